"""What a kernel-testing harness needs to know of the operators: names, inputs, gradients, budgets.

The tests of this project use it; a harness that compares several implementations of the same operator can too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

__all__ = ["OPERATORS", "Budget", "Operator", "Shape", "generate", "tolerance"]


@dataclass(frozen=True)
class Operator:
    """An operator by name: its tensor inputs in order (``optional`` may be None), its outputs, its gradients."""

    name: str
    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: dict[str, str]
    """Input name to gradient name."""


_GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "sinks": "dsinks"}
OPERATORS: dict[str, Operator] = {
    op.name: op
    for op in (
        Operator(
            "detattn::attention",
            ("q", "k", "v", "key_padding_mask", "sinks"),
            ("key_padding_mask", "sinks"),
            ("out", "lse"),
            _GRADIENTS,
        ),
        Operator(
            "detattn::attention_varlen",
            ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "sinks"),
            ("cu_seqlens_k", "seqused_k", "block_table", "sinks"),
            ("out", "lse"),
            _GRADIENTS,
        ),
    )
}


@dataclass(frozen=True)
class Shape:
    """The sizes of a dense call."""

    batch: int = 1
    heads_q: int = 4
    heads_kv: int = 2
    queries: int = 128
    keys: int = 128
    head_dim: int = 64


def generate(
    shape: Shape,
    dtype: torch.dtype,
    *,
    seed: int,
    device: str = "cpu",
    spread: float = 1.0,
    sinks: bool = False,
    keep: float | None = None,
) -> dict[str, Tensor | None]:
    """The tensor inputs of ``detattn::attention`` by name, normal with standard deviation ``spread``.

    ``keep`` is the share of keys that a random padding mask keeps (None: no mask). A seed gives the same values on
    every device.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return (torch.randn(size, generator=g, dtype=torch.float64) * spread).to(dtype).to(device)

    s = shape
    mask = None if keep is None else (torch.rand(s.batch, s.keys, generator=g) < keep).to(device)
    return {
        "q": normal(s.batch, s.heads_q, s.queries, s.head_dim),
        "k": normal(s.batch, s.heads_kv, s.keys, s.head_dim),
        "v": normal(s.batch, s.heads_kv, s.keys, s.head_dim),
        "key_padding_mask": mask,
        "sinks": normal(s.heads_q).to(torch.float64 if dtype is torch.float64 else torch.float32) if sinks else None,
    }


@dataclass(frozen=True)
class Budget:
    """How far a result may be from fp64: ``multiple`` times the error of plain PyTorch in the same dtype, plus a floor.

    Errors are relative in the 2-norm. ``invariance`` is the number of bits that may differ between two runs that a
    promise makes equal.
    """

    multiple: float
    floor: float
    invariance: int

    def allows(self, error: float, peer: float) -> bool:
        """Whether ``error`` is within the budget, beside a peer's error on the same inputs. NaN never is."""
        return error <= self.multiple * peer + self.floor


@cache
def _document() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(files(__name__).joinpath("tolerance.json").read_text())
    return loaded


def tolerance(dtype: torch.dtype, what: str = "forward") -> Budget:
    """The budget of ``tolerance.json`` for a dtype and ``"forward"`` or ``"backward"``.

    Example:
        >>> tolerance(torch.bfloat16).invariance
        0
    """
    document = _document()
    entry = document["accuracy"][what][str(dtype).removeprefix("torch.")]
    invariance = int(document["invariance"]["every_dtype"]["differing_bits"])
    return Budget(entry["multiple"], entry["floor"], invariance)
