"""What an engine does (decode at every length, beside prefills, from pages, in graphs) leaves the bits of prefill.

The sizes go past every chunk edge up to 40k keys on a GPU, and past the first one on the CPU.
"""

from __future__ import annotations

import random

import pytest
import torch
from common import attention, offsets, pack, paged, raw, varlen
from torch import Tensor

from detattn import contract

NAN = float("nan")


class Bits:
    """Counts elements whose bits differ, without waiting for the device at every comparison."""

    def __init__(self, device: str) -> None:
        self.bad = torch.zeros((), dtype=torch.int64, device=device)

    def compare(self, *pairs: tuple[Tensor, Tensor]) -> None:
        for a, b in pairs:
            assert a.shape == b.shape, (a.shape, b.shape)
            self.bad += (raw(a) != raw(b)).sum()

    def count(self) -> int:
        return int(self.bad)


def inputs(device: str, *sizes: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """q, k, v of ``batch, heads_q, heads_kv, queries, keys, head_dim``, drawn where they are used."""
    batch, heads_q, heads_kv, queries, keys, dim = sizes
    g = torch.Generator(device).manual_seed(seed)
    shapes = ((heads_q, queries), (heads_kv, keys), (heads_kv, keys))
    q, k, v = (torch.randn(batch, h, n, dim, generator=g, device=device).to(dtype) for h, n in shapes)
    return q, k, v


def paged_call(parts: list[tuple[Tensor, Tensor, Tensor]], page_size: int, seed: int, **options) -> tuple[Tensor, ...]:
    """Sequences ``q [Hq, n, D], k, v [Hkv, S, D]`` in one call, their pages shuffled among poisoned ones."""
    device = parts[0][0].device
    counts = [-(-k.shape[1] // page_size) for _, k, _ in parts]
    order = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
    table = torch.full((len(parts), max(counts) + 1), -7, dtype=torch.int32)
    caches = []
    for n in (1, 2):
        like = parts[0][n]
        cache = torch.full((sum(counts) + 3, page_size, like.shape[0], like.shape[2]), NAN, dtype=like.dtype).to(device)
        at = 0
        for b, part in enumerate(parts):
            mine = order[at : at + counts[b]]
            one = paged(part[n], page_size, mine)[mine]
            cache[torch.tensor(mine, device=device)] = one
            table[b, : counts[b]] = torch.tensor(mine, dtype=torch.int32)
            at += counts[b]
        caches.append(cache)
    used = torch.tensor([k.shape[1] for _, k, _ in parts], dtype=torch.int32, device=device)
    q = torch.cat([pack(p[0]) for p in parts])
    cu = offsets([p[0].shape[1] for p in parts], str(device))
    return varlen(q, *caches, cu, block_table=table.to(device), seqused_k=used, **options)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_every_short_length(device: str, group: int) -> None:
    longest = 300 if device == "cuda" else 80
    q, k, v = inputs(device, 1, 2 * group, 2, longest, longest, 64, seed=group)
    whole, bits = attention(q, k, v), Bits(device)
    for end in range(1, longest + 1):
        for count in {1, 2 + end % 16} if device == "cuda" else {1, 1 + end % 5}:
            rows = slice(max(end - count, 0), end)
            got = attention(q[:, :, rows], k[:, :, :end], v[:, :, :end])
            bits.compare((whole[0][:, :, rows], got[0]), (whole[1][:, :, rows], got[1]))
    assert bits.count() == 0
    bits.compare((whole[0][:, :, :1], whole[0][:, :, 1:2]))
    assert bits.count() > 0


def chunk_edges(longest: int) -> list[int]:
    return sorted({e + d for _, e in contract.chunks(longest) for d in (-1, 0, 1) if e + d <= longest})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_chunk_edge(device: str, head_dim: int) -> None:
    longest = 40_963 if device == "cuda" else 2_051
    q, k, v = inputs(device, 1, 4, 1, longest if device == "cuda" else 1_040, longest, head_dim, seed=head_dim)
    first = longest - q.shape[2]
    whole, bits = attention(q, k, v), Bits(device)
    ends = chunk_edges(longest)
    if device == "cuda":
        assert len(ends) > 100
    for i, end in enumerate(ends):
        if end - 17 < first:
            continue
        for count in (1, 2 + i % 16):
            rows, at = slice(end - count - first, end - first), slice(0, end)
            got = attention(q[:, :, rows], k[:, :, at], v[:, :, at])
            bits.compare((whole[0][:, :, rows], got[0]), (whole[1][:, :, rows], got[1]))
            if i % 6 == 0:
                part = (q[0, :, rows], k[0, :, at], v[0, :, at])
                got = paged_call([part], (16, 64, 48)[i % 3], seed=i)
                bits.compare((pack(whole[0][0, :, rows]), got[0]), (whole[1][0, :, rows], got[1]))
    assert bits.count() == 0
    bits.compare((whole[1][:, :, :-1], whole[1][:, :, 1:]))
    assert bits.count() > 0


@pytest.mark.parametrize("length", [1024, 2048, 3000])
def test_any_batch_size_decodes_to_the_same_bits(device: str, length: int) -> None:
    """However many sequences share the GPU, and so however a chunk is spread over it."""
    sizes = [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 130, 200] if device == "cuda" else [1, 2, 5]
    q, k, v = inputs(device, max(sizes), 8, 2, 1, length, 128, seed=length)
    alone = [attention(q[b : b + 1], k[b : b + 1], v[b : b + 1]) for b in range(max(sizes))]
    bits = Bits(device)
    for n in sizes:
        got = attention(q[:n], k[:n], v[:n])
        for part in range(2):
            bits.compare((torch.cat([a[part] for a in alone[:n]]), got[part]))
    assert bits.count() == 0
    bits.compare((alone[0][0], alone[1][0]))
    assert bits.count() > 0


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_growing_neighbour_moves_nothing(device: str, head_dim: int) -> None:
    """A neighbour that grows past the sizes at which a sequence changes its tiling, beside rows that decode."""
    q, k, v = inputs(device, 2, 8, 2, 66, 1400, head_dim, seed=5)
    mine = (q[0, :, -1:], k[0], v[0])
    want, bits = attention(mine[0][None], mine[1][None], mine[2][None]), Bits(device)
    other = attention(q[1:], k[1:], v[1:])
    for count in (1, 2, 3, 8, 9, 10, 16, 17, 32, 33, 64, 65, 66):
        neighbour = (q[1, :, -count:], k[1], v[1])
        for first in (True, False):
            parts = [neighbour, mine] if first else [mine, neighbour]
            at, rest = (count, slice(0, count)) if first else (0, slice(1, None))
            cu_q, cu_k = offsets([p[0].shape[1] for p in parts], device), offsets([1400, 1400], device)
            packed = varlen(*(torch.cat([pack(p[n]) for p in parts]) for n in range(3)), cu_q, cu_k)
            for got in (packed, paged_call(parts, 16, seed=count)):
                bits.compare((want[0][0, :, 0], got[0][at]), (want[1][0, :, 0], got[1][:, at]))
                bits.compare((pack(other[0][0, :, -count:]), got[0][rest]), (other[1][0, :, -count:], got[1][:, rest]))
    assert bits.count() == 0
    bits.compare((want[0][0, :, 0], other[0][0, :, -1]))
    assert bits.count() > 0


def test_windows_never_read_evicted_pages(device: str) -> None:
    """A model with a window drops the pages behind it: their slots hold NaN, or their entries name no page at all."""
    length, window, page_size = 1500, 200, 16
    q, k, v = inputs(device, 1, 8, 2, 3, length, 128, seed=9)
    want, bits = attention(q, k, v, window_left=window), Bits(device)
    gone = (length - 3 - window) // page_size
    for evicted in ("slots", "entries"):
        for count in (1, 3):
            cache_k, cache_v = (paged(t[0], page_size, list(range(-(-length // page_size)))) for t in (k, v))
            table = torch.arange(-(-length // page_size), dtype=torch.int32, device=device)[None].clone()
            if evicted == "slots":
                cache_k[:gone] = cache_v[:gone] = NAN
            elif device == "cuda":
                table[:, :gone] = 1 << 30
            used = torch.tensor([length], dtype=torch.int32, device=device)
            got = varlen(
                pack(q[0, :, -count:]),
                cache_k,
                cache_v,
                offsets([count], device),
                block_table=table,
                seqused_k=used,
                window_left=window,
            )
            bits.compare((pack(want[0][0, :, -count:]), got[0]), (want[1][0, :, -count:], got[1]))
    assert bits.count() == 0
    full = attention(q, k, v)
    bits.compare((full[0], want[0]))
    assert bits.count() > 0


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("queries", [1, 70])
def test_a_page_that_does_not_exist_reads_as_zeros(device: str, page_size: int, queries: int) -> None:
    if device != "cuda":
        pytest.skip("the CPU raises")
    length = 700
    q, k, v = inputs(device, 1, 4, 1, queries, length, 128)
    pages = -(-length // page_size)
    cache_k, cache_v = (paged(t[0], page_size, list(range(pages))) for t in (k, v))
    used = torch.tensor([length], dtype=torch.int32, device=device)
    k, v = k.clone(), v.clone()
    k[:, :, page_size : 2 * page_size] = v[:, :, page_size : 2 * page_size] = 0
    want = attention(q, k, v)
    for wrong in (-1, -(1 << 31), cache_k.shape[0], (1 << 31) - 1):
        table = torch.arange(pages, dtype=torch.int32, device=device)[None].clone()
        table[0, 1] = wrong
        got = varlen(pack(q[0]), cache_k, cache_v, offsets([queries], device), block_table=table, seqused_k=used)
        bits = Bits(device)
        bits.compare((pack(want[0][0]), got[0]), (want[1][0], got[1]))
        assert bits.count() == 0, wrong


def test_a_graph_captured_at_batch_64_serves_2(device: str) -> None:
    if device != "cuda":
        pytest.skip("CUDA graphs")
    batch, page_size, pages = 64, 16, 100
    q, _, _ = inputs(device, 1, 8, 2, batch, 1, 128, seed=1)
    q = pack(q[0]).contiguous()
    cache_k, cache_v = (t[0].view(2, pages * 8, page_size, 128).transpose(0, 1).transpose(1, 2).contiguous() for t in
                        inputs(device, 1, 2, 2, 1, pages * 8 * page_size, 128, seed=2)[1:])  # fmt: skip
    cu = offsets([1] * batch, device)
    used = torch.full((batch,), 1500, dtype=torch.int32, device=device)
    table = torch.randint(0, pages * 8, (batch, pages), dtype=torch.int32, device=device)

    def call() -> tuple[Tensor, Tensor]:
        return varlen(q, cache_k, cache_v, cu, block_table=table, seqused_k=used)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for live, lengths in (
        (64, [1500] * 64),
        (2, [1450, 37]),
        (5, [1, 1024, 1025, 1599, 16]),
        (0, []),
        (64, [900] * 64),
    ):
        cu.copy_(offsets([1] * live + [0] * (batch - live), device))
        used.zero_()
        used[:live] = torch.tensor(lengths, dtype=torch.int32, device=device)
        table[live:] = -1
        table[:live] = torch.randint(0, pages * 8, (live, pages), dtype=torch.int32, device=device)
        out.fill_(NAN)
        lse.fill_(NAN)
        for _ in range(2):
            graph.replay()
        bits = Bits(device)
        for b in range(live):
            one = slice(b, b + 1)
            got = varlen(q[one], cache_k, cache_v, offsets([1], device), block_table=table[one], seqused_k=used[one])
            bits.compare((got[0], out[one]), (got[1], lse[:, one]))
        assert bits.count() == 0, live
        assert (out[live:] == 0).all() and torch.isneginf(lse[:, live:]).all()
