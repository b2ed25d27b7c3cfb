"""What a backend is, and the one place that chooses among them."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

Layout = Literal["dense", "varlen", "paged"]


class Spec(NamedTuple):
    """All that may decide which backend, and so which arithmetic, serves a call.

    No batch size, no length, no SM count is in it: what must not choose numerics is not in the type.
    """

    device_type: str
    arch: tuple[int, int] | None
    dtype: torch.dtype
    head_dim: int
    layout: Layout
    key_padding_mask: bool
    sinks: bool
    window: bool
    softcap: bool
    backward: bool


class Options(NamedTuple):
    """The mask and score options of a call, defaults resolved; windows are in keys, -1 = unbounded."""

    causal: bool
    scale: float
    window_left: int
    window_right: int
    softcap: float


class Sequences(NamedTuple):
    """Where the sequences of a varlen call lie. All int32 tensors on the device of q; ``None`` where not given."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None


class Backend(Protocol):
    """One implementation of the contract.

    ``seqs`` is ``None`` for the dense layout: q ``[B, Hq, Sq, D]``, k and v ``[B, Hkv, Skv, D]``, lse ``[B, Hq, Sq]``.
    Otherwise q is ``[Tq, Hq, D]``, k and v ``[Tk, Hkv, D]`` or ``[num_pages, page_size, Hkv, D]``, lse ``[Hq, Tq]``.
    Results are freshly allocated and contiguous; lse is fp32, fp64 for fp64 inputs. The caller checked the arguments.
    """

    name: str

    def supports(self, spec: Spec) -> str | None:
        """``None`` where the backend serves the spec, otherwise the reason in words."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_padding_mask: Tensor | None,
        sinks: Tensor | None,
        seqs: Sequences | None,
        options: Options,
    ) -> tuple[Tensor, Tensor]:
        """``out`` (as q) and ``lse``."""

    def backward(
        self,
        dout: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        key_padding_mask: Tensor | None,
        sinks: Tensor | None,
        seqs: Sequences | None,
        options: Options,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """``dq``, ``dk``, ``dv`` and ``dsinks`` (empty where no sinks were given); ``None`` gradients mean zero."""


class UnsupportedError(RuntimeError):
    """No backend serves the call; the message holds every backend's reason."""
