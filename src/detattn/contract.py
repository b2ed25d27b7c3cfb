"""The numeric contract: its version, its constants, its promises.

This module is the source of every constant that decides a bit. ``csrc/contract.h`` repeats them for C++ and CUDA; the
build, a test and the loading of each compiled library compare the two. It imports nothing but the standard library,
so that the build can read it before PyTorch is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

VERSION = 2
"""Names the whole arithmetic. A change that can move any bit of any backend raises it."""

MAX_HEAD_DIM = 256
LAZY_THRESHOLD = 8.0
"""Powers of two by which a block maximum must pass a row's exponent reference before the reference moves."""

BLOCK_KEYS = 128
BLOCK_KEYS_WIDE = 64
BLOCK_WIDE_ABOVE = 128

UNBOUNDED = 2**63 - 1
CHUNK_SCHEDULE: tuple[tuple[int, int], ...] = ((32768, 1024), (UNBOUNDED, 2048))
"""``(end, keys)``: below relative key ``end`` a chunk holds ``keys`` keys."""


def block_keys(head_dim: int) -> int:
    """Keys of one step of the online softmax, a function of the head dim alone.

    Example:
        >>> block_keys(128), block_keys(192)
        (128, 64)
    """
    return BLOCK_KEYS_WIDE if head_dim > BLOCK_WIDE_ABOVE else BLOCK_KEYS


def chunks(keys: int) -> Iterator[tuple[int, int]]:
    """The chunks ``(begin, end)`` that cover ``keys`` relative keys, left to right; the last one is cut at ``keys``.

    Example:
        >>> list(chunks(2500))
        [(0, 1024), (1024, 2048), (2048, 2500)]
    """
    begin = 0
    for end, size in CHUNK_SCHEDULE:
        while begin < min(end, keys):
            yield begin, min(begin + size, keys)
            begin += size


def constants() -> dict[str, float]:
    """Every constant that ``csrc/contract.h`` repeats, by the name it has there."""
    flat: dict[str, float] = {
        "kContractVersion": VERSION,
        "kMaxHeadDim": MAX_HEAD_DIM,
        "kLazyThreshold": LAZY_THRESHOLD,
        "kBlockKeys": BLOCK_KEYS,
        "kBlockKeysWide": BLOCK_KEYS_WIDE,
        "kBlockWideAbove": BLOCK_WIDE_ABOVE,
        "kChunkSteps": len(CHUNK_SCHEDULE),
    }
    for i, (end, size) in enumerate(CHUNK_SCHEDULE):
        flat[f"kChunks.step[{i}].end"] = end
        flat[f"kChunks.step[{i}].keys"] = size
    return flat


Scope = Literal["forward", "backward", "both"]


@dataclass(frozen=True)
class Promise:
    """One thing that may change freely without moving a bit of a row.

    ``scope`` says whether the promise covers ``out`` and ``lse`` only, or the gradients too.
    """

    id: str
    text: str
    scope: Scope


PROMISES: tuple[Promise, ...] = (
    Promise("rerun", "the same call again, under load, on another stream, in another process", "both"),
    Promise("batch-size", "how many sequences share the call", "both"),
    Promise("batch-position", "where in the batch a sequence stands", "both"),
    Promise("neighbours", "what the other sequences hold and how long they are", "both"),
    Promise("chunked-prefill", "any cut of the queries into calls, cuts of one token included", "forward"),
    Promise("decode", "one query, or a few, against the cache, at any length, split or not", "forward"),
    Promise("right-padding", "keys and queries after the sequence, whatever they hold (NaN and Inf included)", "both"),
    Promise("left-padding", "keys and queries before the sequence, whatever they hold (gradients: causal)", "both"),
    Promise("packed", "dense batch = packed (cu_seqlens) = each sequence alone", "both"),
    Promise("paged", "contiguous cache = any page size, page order, shared pages, rubbish in unused slots", "forward"),
    Promise("layout", "strides: [B,H,S,D] or [B,S,H,D] views, slices, expanded heads", "both"),
    Promise("heads", "a slice of the heads; GQA = MHA with K and V repeated", "forward"),
    Promise("bounds", "max_seqlen_q and max_seqlen_k are only bounds", "both"),
    Promise("mask-neutral", "a window as long as the sequence = causal; an all-True padding mask = none", "forward"),
    Promise("execution", "eager = compiled = exported = graph replay; any thread count, any number of SMs", "both"),
    Promise("lse-request", "with or without anybody looking at lse", "forward"),
)


def promise(id: str) -> Promise:
    """The promise of that id. Raises ``KeyError`` naming the known ids."""
    for p in PROMISES:
        if p.id == id:
            return p
    raise KeyError(f"no promise {id!r}; known: {', '.join(p.id for p in PROMISES)}")
