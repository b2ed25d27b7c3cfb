"""Attention whose bits you can trust.

``detattn.attention`` and ``detattn.attention_varlen`` return, for a row, bits that depend on that row's query and its
visible keys alone; the package ``detattn.audit`` (imported by that name) checks any attention for the same.
"""

from __future__ import annotations

from . import contract
from ._version import __version__
from .api import attention, attention_varlen
from .backends import Spec, UnsupportedError, explain

__all__ = ["Spec", "UnsupportedError", "__version__", "attention", "attention_varlen", "contract", "explain"]
