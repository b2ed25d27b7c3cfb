"""The inputs of the checks: random sequences, and the lengths at which attention kernels change their ways."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import contract

LONG = 2177
"""More than 2k keys, one past a block edge, past the second chunk edge of the contract."""

VERY_LONG = 8192 + 1024 + 130
"""Past the ninth chunk edge of the contract; used with a few queries only."""

QUERY_TILES = (31, 32, 33, 767, 768, 769)
"""Query counts around which PyTorch's CPU attention changes its tile."""


def edges(head_dim: int, below: int) -> tuple[int, ...]:
    """Key counts beside the edges of blocks and chunks, ascending, up to ``below``.

    Example:
        >>> edges(64, 700)
        (1, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 700)
    """
    block = contract.block_keys(head_dim)
    marks = {64, block, 2 * block, *(end for _, end in contract.chunks(below))}
    near = {m + d for m in marks for d in (-1, 0, 1)}
    return tuple(sorted({1, below, *(n for n in near if 0 < n < below)}))


@dataclass(frozen=True)
class Sequence:
    """One sequence, the unit whose bits are promised.

    q, dout: ``[Hq, Sq, D]``; k, v: ``[Hkv, Skv, D]``; dlse: ``[Hq, Sq]``; sinks: ``[Hq]`` or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    sinks: Tensor | None

    def __str__(self) -> str:
        if self.queries == self.keys:
            return f"{self.keys} tokens"
        return f"{self.queries} {'query' if self.queries == 1 else 'queries'} on {self.keys} keys"

    @property
    def queries(self) -> int:
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        return self.k.shape[1]

    def cut(self, begin: int, end: int) -> Sequence:
        """Queries ``begin..end`` against the keys that the last of them sees, as a cache would hold them then."""
        keys = self.keys - self.queries + end
        rows = slice(begin, end)
        return replace(
            self,
            q=self.q[:, rows],
            k=self.k[:, :keys],
            v=self.v[:, :keys],
            dout=self.dout[:, rows],
            dlse=self.dlse[:, rows],
        )

    def heads(self, kv_begin: int, kv_end: int) -> Sequence:
        """The key heads ``kv_begin..kv_end`` with the query heads that read them, as tensor parallelism cuts."""
        group = self.q.shape[0] // self.k.shape[0]
        h = slice(kv_begin * group, kv_end * group)
        return Sequence(
            self.q[h],
            self.k[kv_begin:kv_end],
            self.v[kv_begin:kv_end],
            self.dout[h],
            self.dlse[h],
            None if self.sinks is None else self.sinks[h],
        )


@dataclass(frozen=True)
class Family:
    """Sequences that may share a call: one number of heads, one head dim, one stream of random numbers.

    In a ``cancelling`` one keys come in pairs, scattered over the sequence, of one key and opposite values, and what is
    left over has small values. A row that sees them all sums large numbers to a small one, so that a difference in the
    last bits of an fp32 accumulator survives the rounding of ``out`` to bf16 or fp16.
    """

    heads: int
    kv_heads: int
    head_dim: int
    with_sinks: bool
    seed: int
    device: torch.device
    dtype: torch.dtype
    cancelling: bool = False

    def __str__(self) -> str:
        sinks = ", sinks" if self.with_sinks else ""
        return f"heads {self.heads}/{self.kv_heads}, dim {self.head_dim}{sinks}"

    def sequence(self, queries: int, keys: int | None = None, number: int = 0, loudness: float = 1.0) -> Sequence:
        """Sequence ``number`` of that length: unit normal data, the same for the same arguments on every device.

        In a cancelling family the values of up to two keys are small, and those of the others cancel.
        """
        keys = queries if keys is None else keys
        generator = torch.Generator().manual_seed(hash((self.seed, self.head_dim, queries, keys, number)) % 2**63)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return (torch.randn(shape, generator=generator) * loudness).to(self.device, dtype)

        accumulator = torch.float64 if self.dtype is torch.float64 else torch.float32
        q, k, v = (
            normal(heads, length, self.head_dim)
            for heads, length in ((self.heads, queries), (self.kv_heads, keys), (self.kv_heads, keys))
        )
        if self.cancelling and keys > 2:
            pairs = (keys - 1) // 2
            order = torch.randperm(keys, generator=generator).to(self.device)
            one, other, rest = order[:pairs], order[pairs : 2 * pairs], order[2 * pairs :]
            k[:, other], v[:, other] = k[:, one], -v[:, one]
            v[:, rest] *= 2.0**-6
        return Sequence(
            q,
            k,
            v,
            normal(self.heads, queries, self.head_dim),
            normal(self.heads, queries, dtype=accumulator),
            self.sinks(),
        )

    def wide(self) -> Family:
        """The same with four times the heads, for calls of few queries: more rows show what few elements show."""
        return replace(self, heads=4 * self.heads, kv_heads=4 * self.kv_heads)

    def sinks(self) -> Tensor | None:
        """The family's sinks ``[Hq]``; None where it has none."""
        if not self.with_sinks:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.heads, generator=generator).to(self.device, torch.float32)

    def sequences(self, count: int, queries: int, keys: int | None = None) -> list[Sequence]:
        """``count`` different sequences of one length."""
        return [self.sequence(queries, keys, number) for number in range(count)]


def families(grouped: bool, sinks: bool, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Family, ...]:
    """As many key heads as query heads at head dim 128, and grouped heads at 64, each with its own seed."""
    return (
        Family(2, 2, 128, sinks, seed, device, dtype, cancelling=True),
        Family(4, 2 if grouped else 4, 64, False, seed + 100, device, dtype, cancelling=True),
    )


def rubbish(shape: Many[int], like: Tensor, kind: str) -> Tensor:
    """What padding may hold: ``"large"`` finite numbers, ``"nan"`` or ``"inf"`` of both signs.

    Raises:
        ValueError: another kind.
    """
    generator = torch.Generator().manual_seed(math.prod(shape))
    t = (torch.randn(*shape, generator=generator) * 100).to(like.device, like.dtype)
    if kind == "large":
        return t
    if kind == "nan":
        return t * math.nan
    if kind == "inf":
        return t * math.inf
    raise ValueError(f"no rubbish of kind {kind!r}; there are large, nan, inf")
