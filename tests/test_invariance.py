"""Every promise, bit for bit, on every backend: bytes of out, lse and, where the promise covers them, of the gradients.

Each test ends in a control: the same comparison, on a call that was nudged by one unit in the last place or that breaks
the promise's premise, must find a difference.
"""

from __future__ import annotations

import inspect
import random
import sys

import pytest
import torch
from common import Named, assert_same_bits, attention, differing, offsets, pack, paged, raw, run, upstream, varlen
from conftest import serves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detattn import contract
from detattn.harness import Shape, generate, tolerance

NAN = float("nan")
BUDGET = tolerance(torch.float32).invariance


class Case:
    """What a test runs on: sizes a backend can afford, its dtypes, whether gradients can be had."""

    def __init__(self, backend: str, device: str) -> None:
        self.backend, self.device = backend, device
        slow = backend == "reference"
        self.dtypes = (
            (torch.bfloat16, torch.float16)
            if device == "cuda"
            else (torch.float32,)
            if slow
            else (torch.float32, torch.bfloat16)
        )
        self.dims = (16,) if slow else (64, 192)
        self.heads = (2, 1) if slow else (4, 2)
        # Past a block edge and a chunk edge; the reference takes a second a thousand keys.
        self.length = 1060 if slow else 1100
        self.queries = 4 if slow else 150
        self.grad = serves(backend, device, self.dtypes[0], self.dims[0], backward=True)

    def inputs(self, batch: int, queries: int, keys: int, seed: int, dtype: torch.dtype, dim: int) -> dict:
        shape = Shape(batch, *self.heads, queries, keys, dim)
        return {n: t for n, t in generate(shape, dtype, seed=seed, device=self.device).items() if t is not None}

    def each(self, batch: int, queries: int, keys: int):
        for seed, dtype in enumerate(self.dtypes):
            for dim in self.dims:
                yield self.inputs(batch, queries, keys, seed, dtype, dim)

    def run(self, x: dict, grad: bool | None = None, **options) -> Named:
        wanted = self.grad if grad is None else grad
        return run(attention, x["q"], x["k"], x["v"], grad=wanted, backend=self.backend, **options)


@pytest.fixture
def case(backend: str, device: str) -> Case:
    return Case(backend, device)


def rows(x: Named | dict, b: slice) -> dict:
    return {n: t[b] for n, t in x.items()}


def last(got: Named, n: int, start: int | None = None) -> Named:
    """out and lse of n rows of a dense call."""
    of = slice(start, None if start is None else start + n) if start is not None else slice(-n, None)
    return {"out": got["out"][:, :, of], "lse": got["lse"][:, :, of]}


def must_differ(a: Named, b: Named) -> None:
    """The control: a comparison that cannot see this cannot see anything."""
    with pytest.raises(AssertionError, match="bits differ"):
        assert_same_bits(a, b, BUDGET)


def nudge(got: Named) -> Named:
    """One element of every tensor, one unit in the last place away."""
    moved = {n: t.clone(memory_format=torch.contiguous_format) for n, t in got.items()}
    for t in moved.values():
        flat = raw(t).reshape(-1)
        flat[flat.numel() // 2] ^= 1
        t.copy_(flat.view(t.dtype).reshape(t.shape))
    return moved


def with_upstream(batch: Named, b: slice) -> dict:
    """The upstream gradients that ``run`` made for a batch, cut to some of its sequences."""
    return {"dout": upstream(batch["out"], 1)[b], "dlse": upstream(batch["lse"], 2)[b]}


def test_rerun(case: Case) -> None:
    for x in case.each(2, case.queries, case.length):
        first = case.run(x)
        for _ in range(3):
            assert_same_bits(first, case.run(x), BUDGET)
        must_differ(first, nudge(first))


def test_batch_size_and_position(case: Case) -> None:
    for x in case.each(3, case.queries, case.length):
        batch = case.run(x)
        for b in range(3):
            of = slice(b, b + 1)
            alone = case.run(rows(x, of), **with_upstream(batch, of))
            assert_same_bits(rows(batch, of), alone, BUDGET)
        order = torch.tensor([2, 0, 1], device=case.device)
        moved = case.run(
            {n: t[order] for n, t in x.items()},
            dout=upstream(batch["out"], 1)[order],
            dlse=upstream(batch["lse"], 2)[order],
        )
        assert_same_bits({n: t[order] for n, t in batch.items()}, moved, BUDGET)
        must_differ(batch, moved)


def test_neighbours(case: Case) -> None:
    """What the neighbours hold, NaN included, and how long they are, in a packed call of many lengths."""
    for x in case.each(3, case.queries, case.length):
        batch = case.run(x)
        for wild in (1e4, NAN):
            y = {n: t.clone() for n, t in x.items()}
            for t in y.values():
                t[0] = t[2] = wild
            got = case.run(y, **with_upstream(batch, slice(None)))
            assert_same_bits(rows(batch, slice(1, 2)), rows(got, slice(1, 2)), BUDGET)
        must_differ(batch, got)
    x = case.inputs(1, 40, 40, 3, case.dtypes[0], case.dims[0])
    grad = {"grad": case.grad, "backend": case.backend}
    alone = packed_run(x, [40], 0, **grad)
    for lengths in ([1, 40, 9], [40, 129], [300, 2, 40], [40, *[1] * 63]):
        assert_same_bits(alone, packed_run(x, lengths, lengths.index(40), **grad), BUDGET)
    must_differ(alone, nudge(packed_run(x, [7, 40], 1, **grad)))


def packed_run(x: dict, lengths: list[int], mine: int, **options) -> Named:
    """Sequence ``mine`` of a packed call is ``x``, with fixed upstream gradients; the others are random."""
    cu = offsets(lengths, str(x["q"].device))
    at = slice(int(cu[mine]), int(cu[mine + 1]))
    total, tensors = int(cu[-1]), {}
    for i, (n, t) in enumerate(x.items()):
        tensors[n] = upstream(pack(t[0]).new_empty(total, t.shape[1], t.shape[3]), 50 + i)
        tensors[n][at] = pack(t[0])
    out, lse = tensors["q"].clone(), tensors["q"].new_empty(x["q"].shape[1], total, dtype=torch.float32)
    dout, dlse = upstream(out, 60), upstream(lse, 61)
    dout[at], dlse[:, at] = upstream(out[at], 62), upstream(lse[:, at], 63)
    got = run(varlen, *tensors.values(), dout=dout, dlse=dlse, cu_q=cu, cu_k=cu, **options)
    return {n: t[:, at] if n == "lse" else t[at] for n, t in got.items()}


def test_chunked_prefill(case: Case) -> None:
    length = case.length
    for x in case.each(1, length if case.backend != "reference" else 30, length):
        n = x["q"].shape[2]
        whole = case.run(x, grad=False)
        start = length - n
        cuts = (
            [[1] * 3 + [n - 3], [n // 2, n - n // 2], [n]]
            if n < 100
            else [
                [1, 31, 32, 33, n - 97],
                [128, 129, n - 257],
                [512, n - 512],
                [767, n - 767],
                [n - 1, 1],
                [n],
            ]
        )
        for cut in cuts:
            at, parts = 0, []
            for c in cut:
                end = start + at + c
                y = {"q": x["q"][:, :, at : at + c], "k": x["k"][:, :, :end], "v": x["v"][:, :, :end]}
                parts.append(case.run(y, grad=False))
                at += c
            joined = {m: torch.cat([p[m] for p in parts], 2) for m in ("out", "lse")}
            assert_same_bits(whole, joined, BUDGET)
        must_differ(whole, nudge(joined))


def edges(length: int) -> list[int]:
    """Lengths around block and chunk edges, and some that are near none."""
    at = {1, 2, 3, 16, 17, 33, 77, length}
    for edge in (64, 128, 256, 512, 1024):
        at |= {edge - 1, edge, edge + 1}
    return sorted(n for n in at if n <= length)


def test_decode(case: Case) -> None:
    for x in case.each(1, case.length, case.length) if case.backend != "reference" else case.each(1, 300, 300):
        whole = case.run(x, grad=False)
        length = x["k"].shape[2]
        for end in edges(length):
            for count in (1, 2, 5, 17):
                if count > end:
                    continue
                y = {"q": x["q"][:, :, end - count : end], "k": x["k"][:, :, :end], "v": x["v"][:, :, :end]}
                got = case.run(y, grad=False)
                assert_same_bits(last(whole, count, end - count), got, BUDGET)
        must_differ(last(whole, 1, 9), last(whole, 1, 10))


def test_decode_at_every_short_length(case: Case) -> None:
    longest = 40 if case.backend == "reference" else 300
    x = case.inputs(1, longest, longest, 0, case.dtypes[-1], case.dims[0])
    whole = case.run(x, grad=False)
    for end in range(1, longest + 1):
        y = {"q": x["q"][:, :, end - 1 : end], "k": x["k"][:, :, :end], "v": x["v"][:, :, :end]}
        assert_same_bits(last(whole, 1, end - 1), case.run(y, grad=False), BUDGET)


@pytest.mark.parametrize("length", [32767, 32768, 32769, 34_820])
def test_decode_past_the_step_of_the_chunk_schedule(device: str, length: int) -> None:
    backend = "cuda" if device == "cuda" else "cpu"
    dtype = torch.bfloat16
    x = generate(Shape(1, 2, 1, 6, length, 64), dtype, seed=length, device=device)
    whole = attention(x["q"], x["k"], x["v"], backend=backend)
    for i in range(6):
        end = length - 5 + i
        got = attention(x["q"][:, :, i : i + 1], x["k"][:, :, :end], x["v"][:, :, :end], backend=backend)
        assert differing(whole[0][:, :, i : i + 1], got[0]) == 0 and differing(whole[1][:, :, i : i + 1], got[1]) == 0
    assert differing(whole[0][:, :, :1], got[0]) > 0


def padded(x: dict, before: int, after: int, fill: float) -> dict:
    def pad(t: torch.Tensor) -> torch.Tensor:
        b, h, s, d = t.shape
        wide = torch.full((b, h, before + s + after, d), fill, dtype=t.dtype, device=t.device)
        wide[:, :, before : before + s] = t
        return wide

    return {n: pad(t) for n, t in x.items()}


@pytest.mark.parametrize("side", ["right-padding", "left-padding", "both"])
def test_padding(case: Case, side: str) -> None:
    length = case.queries + 40
    before, after = {"right-padding": (0, 70), "left-padding": (131, 0), "both": (5, 139)}[side]
    for x in case.each(1, length, length):
        alone = case.run(x)
        up = with_upstream(alone, slice(None))
        mask = torch.zeros(1, before + length + after, dtype=torch.bool, device=case.device)
        mask[:, before : before + length] = True
        inner = slice(before, before + length)
        for fill in (0.0, NAN, float("inf"), 1e4):
            y = padded(x, before, after, fill)
            wide = padded({"dout": up["dout"]}, before, after, 0.0 if fill != fill else 1.0)
            dlse = torch.zeros(
                *alone["lse"].shape[:2], before + length + after, dtype=alone["lse"].dtype, device=case.device
            )
            dlse[:, :, inner] = up["dlse"]
            # A padded query row after the sequence sees real keys: only a zero upstream keeps it out of dk and dv.
            wide["dout"][:, :, before + length :] = 0.0
            got = case.run(y, key_padding_mask=mask, dout=wide["dout"], dlse=dlse)
            assert_same_bits(alone, {n: t[:, :, inner] for n, t in got.items()}, BUDGET)
        if case.grad:
            outside = torch.cat([got["dk"][:, :, :before], got["dk"][:, :, before + length :]], 2)
            assert (outside == 0).all()
        must_differ(alone, nudge({n: t[:, :, inner] for n, t in got.items()}))


def test_holes_in_the_padding_mask(case: Case) -> None:
    """Masked keys may hold anything; the mask, not the values, decides."""
    for x in case.each(2, 20, case.length):
        g = torch.Generator().manual_seed(1)
        mask = (torch.rand(2, case.length, generator=g) < 0.8).to(case.device)
        got = case.run(x, key_padding_mask=mask)
        gone = ~mask[:, None, :, None]
        # The GPU multiplies a block's zeros with its values (the limit tested below), so those stay finite there.
        y = dict(x, k=x["k"].masked_fill(gone, NAN), v=x["v"].masked_fill(gone, NAN if case.device == "cpu" else 1e4))
        assert_same_bits(got, case.run(y, key_padding_mask=mask), BUDGET)
        must_differ(got, case.run(x))


def test_non_finite_values_in_the_future_and_outside_the_window(case: Case) -> None:
    """What a row cannot see may be NaN or Inf: the future, the keys before its window.

    On the GPU the values (not the keys) of a block that other rows of the same tile see are left finite here; the test
    below says what happens otherwise.
    """
    n = case.length if case.backend != "reference" else 60
    for x in case.each(1, n, n):
        at = n // 2 + 3
        in_v, before = (at, at) if case.device == "cpu" else (-(-(at + 192) // 128) * 128, (at - 212) // 128 * 128)
        for options in ({}, {"window_left": 20}):
            whole = case.run(x, grad=False, **options)
            y = {m: t.clone() for m, t in x.items()}
            y["k"][:, :, at:] = y["v"][:, :, in_v:] = NAN
            y["v"][:, :, in_v + 1 :] = float("inf")
            got = case.run(y, grad=False, **options)
            assert_same_bits(last(whole, at, 0), last(got, at, 0), BUDGET)
            must_differ(last(whole, 1, at), last(got, 1, at))
        y = {m: t.clone() for m, t in x.items()}
        y["k"][:, :, :at] = y["v"][:, :, :before] = NAN
        got = case.run(y, grad=False, window_left=20)
        assert_same_bits(last(whole, n - at - 20, at + 20), last(got, n - at - 20, at + 20), BUDGET)


def test_limit_of_the_gpu_on_non_finite_values(device: str) -> None:
    """A NaN in V of a *real* later token reaches ``out`` of earlier rows of the same 128-row tile, and nothing else.

    The matrix units multiply the tile's probabilities, zeros included, with the whole block. lse, rows of other tiles,
    and decode are untouched. On the CPU no such row exists.
    """
    if device != "cuda":
        pytest.skip("the CPU has no such limit")
    x = generate(Shape(1, 2, 2, 600, 600, 128), torch.bfloat16, seed=0, device=device)
    clean, at = attention(x["q"], x["k"], x["v"]), 300
    v = x["v"].clone()
    v[:, :, at:] = NAN
    got = attention(x["q"], x["k"], v)
    tile = at // 128 * 128
    assert differing(clean[0][:, :, :tile], got[0][:, :, :tile]) == 0
    assert differing(clean[1], got[1]) == 0
    assert torch.isnan(got[0][:, :, tile:at]).any()
    for row in (tile, at - 1):
        end = slice(0, row + 1)
        alone = attention(x["q"][:, :, row : row + 1], x["k"][:, :, end], v[:, :, end])
        assert differing(alone[0], clean[0][:, :, row : row + 1]) == 0


def test_packed(case: Case) -> None:
    lengths = [1, 15, 16, 17, 127, 128, 129, 0, 150]
    for dtype in case.dtypes:
        dim = case.dims[0]
        parts = [case.inputs(1, n, n, n, dtype, dim) for n in lengths]
        for order in (lengths, sorted(lengths, reverse=True), random.Random(0).sample(lengths, len(lengths))):
            of = [parts[lengths.index(n)] for n in order]
            q, k, v = (torch.cat([pack(p[m][0]) for p in of]) for m in ("q", "k", "v"))
            cu = offsets(order, case.device)
            got = run(varlen, q, k, v, grad=case.grad, cu_q=cu, cu_k=cu, backend=case.backend)
            dout, dlse = upstream(got["out"], 1), upstream(got["lse"], 2)
            for b, x in enumerate(of):
                at = slice(int(cu[b]), int(cu[b + 1]))
                up = {"dout": pack(dout[at])[None], "dlse": dlse[:, at][None]}
                alone = case.run(x, **up)
                mine = {n: (t[:, at][None] if n == "lse" else pack(t[at])[None]) for n, t in got.items()}
                assert_same_bits(alone, mine, BUDGET)
                if x["q"].shape[2] > 0:
                    must_differ(alone, nudge(mine))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 128, 256])
def test_paged(case: Case, page_size: int) -> None:
    length = case.length if case.backend != "reference" else 140
    for x in case.each(1, 3, length):
        whole = case.run(x, grad=False)
        want = {"out": pack(whole["out"][0]), "lse": whole["lse"][0]}
        pages = -(-length // page_size)
        used = torch.tensor([length], dtype=torch.int32, device=case.device)
        for seed in range(2):
            order = random.Random(seed).sample(range(pages + 3), pages)
            k, v = (paged(x[n][0], page_size, order) for n in ("k", "v"))
            table = torch.tensor([[*order, -1, 10**6]], dtype=torch.int32, device=case.device)
            out, lse = varlen(
                pack(x["q"][0]),
                k,
                v,
                offsets([3], case.device),
                block_table=table,
                seqused_k=used,
                backend=case.backend,
            )
            assert_same_bits(want, {"out": out, "lse": lse}, BUDGET)
        must_differ(want, nudge({"out": out, "lse": lse}))


def test_shared_pages_and_interleaved_cache(case: Case) -> None:
    """Six sequences share their first pages; K and V are views of one tensor with a layer stride."""
    length, page_size, shared = 80, 16, 3
    for dtype in case.dtypes:
        x = case.inputs(6, 1, length, 4, dtype, case.dims[0])
        for n in ("k", "v"):
            x[n][:, :, : shared * page_size] = x[n][:1, :, : shared * page_size]
        whole = case.run(x, grad=False)
        own = length // page_size - shared
        pool = torch.full((40, 2, page_size, x["k"].shape[1], x["k"].shape[3]), NAN, dtype=dtype, device=case.device)
        table = torch.full((6, 9), -5, dtype=torch.int32, device=case.device)
        for b in range(6):
            order = [*range(shared), *(3 + b * own + i for i in range(own))]
            table[b, : len(order)] = torch.tensor(order, dtype=torch.int32)
            for side, n in enumerate(("k", "v")):
                for i, page in enumerate(order):
                    pool[page, side] = pack(x[n][b, :, i * page_size : (i + 1) * page_size])
        out, lse = varlen(
            x["q"][:, :, 0],
            pool[:, 0],
            pool[:, 1],
            offsets([1] * 6, case.device),
            block_table=table,
            seqused_k=torch.full((6,), length, dtype=torch.int32, device=case.device),
            backend=case.backend,
        )
        want = {"out": whole["out"][:, :, 0], "lse": whole["lse"][:, :, 0].T}
        assert_same_bits(want, {"out": out, "lse": lse}, BUDGET)
        must_differ(want, {"out": out.flip(0), "lse": lse})


def test_layout(case: Case) -> None:
    for x in case.each(2, case.queries, case.length):
        want = case.run(x)
        up = with_upstream(want, slice(None))

        def sliced(n: str, t: torch.Tensor) -> torch.Tensor:
            size = (t.shape[0], t.shape[1] + 1, t.shape[2] + 2, t.shape[3] + 24)
            view = torch.full(size, NAN, dtype=t.dtype, device=t.device)[:, 1:, 1:-1, 16 : 16 + t.shape[3]]
            return view.copy_(t)

        layouts = {
            "[B,S,H,D]": lambda n, t: t.transpose(1, 2).contiguous().transpose(1, 2),
            "[S,B,H,D]": lambda n, t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
            "slices": sliced,
            "last stride 2": lambda n, t: torch.stack([t, torch.full_like(t, NAN)], -1)[..., 0],
            "odd offset": lambda n, t: torch.cat([t.new_full((3,), NAN), t.reshape(-1)])[3:].view(t.shape),
        }
        for layout in layouts.values():
            y = {n: layout(n, t) for n, t in x.items()}
            got = run_as_is(case, y, layout("q", up["dout"]), up["dlse"])
            assert_same_bits(want, got, BUDGET)
        must_differ(want, nudge(got))


def run_as_is(case: Case, y: dict, dout: torch.Tensor, dlse: torch.Tensor) -> Named:
    """As ``Case.run``, with leaves that keep their strides."""
    leaves = [t.detach().requires_grad_(case.grad) for t in y.values()]
    assert all(a.stride() == b.stride() for a, b in zip(leaves, y.values(), strict=True))
    out, lse = attention(*leaves, backend=case.backend)
    got = {"out": out.detach(), "lse": lse.detach()}
    if case.grad:
        got |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad([out, lse], leaves, [dout, dlse]), strict=True))
    return got


def test_expanded_inputs_and_gradients(case: Case) -> None:
    """Stride-0 heads and batches of k and v, and the stride-0 dout of ``out.sum()``."""
    for x in case.each(2, 40, 70):
        k, v = (x[n][:1, :1].expand_as(x[n]) for n in ("k", "v"))
        want = case.run(dict(x, k=k.contiguous(), v=v.contiguous()), dout=torch.ones_like(x["q"]), dlse=None)
        scalar = torch.ones((), dtype=x["q"].dtype, device=case.device).expand_as(x["q"])
        got = run_as_is(case, dict(x, k=k, v=v), scalar, upstream(want["lse"], 2))
        assert_same_bits(want, got, BUDGET)


def test_heads(case: Case) -> None:
    """A slice of the heads, as tensor parallelism cuts them; K and V repeated instead of grouped."""
    for x in case.each(2, case.queries, case.length):
        want = case.run(x, grad=False)
        heads, kv = case.heads
        group = heads // kv
        for h in range(kv):
            part = {"q": x["q"][:, h * group : (h + 1) * group], "k": x["k"][:, h : h + 1], "v": x["v"][:, h : h + 1]}
            of = slice(h * group, (h + 1) * group)
            assert_same_bits({n: t[:, of] for n, t in want.items()}, case.run(part, grad=False), BUDGET)
        repeated = {"q": x["q"]} | {n: x[n].repeat_interleave(group, 1) for n in ("k", "v")}
        assert_same_bits(want, case.run(repeated, grad=False), BUDGET)
        must_differ(want, {n: t.flip(1) for n, t in want.items()})


@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_group_sizes_decode_as_they_prefill(backend: str, device: str, group: int) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = generate(Shape(1, 2 * group, 2, 140, 140, 64 if device == "cuda" else 16), dtype, seed=group, device=device)
    whole = attention(x["q"], x["k"], x["v"], backend=backend)
    for end in (1, 63, 129, 140):
        got = attention(x["q"][:, :, end - 1 : end], x["k"][:, :, :end], x["v"][:, :, :end], backend=backend)
        assert differing(whole[0][:, :, end - 1 : end], got[0]) == 0
        assert differing(whole[1][:, :, end - 1 : end], got[1]) == 0


def test_bounds(case: Case) -> None:
    x = case.inputs(1, 90, 90, 2, case.dtypes[0], case.dims[0])
    q, k, v = (pack(t[0]) for t in x.values())
    cu = offsets([30, 60], case.device)
    grad = {"grad": case.grad, "backend": case.backend, "cu_q": cu, "cu_k": cu}
    want = run(varlen, q, k, v, **grad)
    for bound in (60, 61, 128, 4096, 10**6):
        assert_same_bits(want, run(varlen, q, k, v, max_seqlen_q=bound, max_seqlen_k=bound, **grad), BUDGET)
    must_differ(
        want,
        run(
            varlen, q, k, v, **(grad | {"cu_q": offsets([31, 59], case.device), "cu_k": offsets([31, 59], case.device)})
        ),
    )


def test_mask_neutral(case: Case) -> None:
    for x in case.each(2, case.queries, case.length):
        want = case.run(x, grad=False)
        ones = torch.ones(2, case.length, dtype=torch.bool, device=case.device)
        assert_same_bits(want, case.run(x, grad=False, window_left=case.length), BUDGET)
        assert_same_bits(want, case.run(x, grad=False, window_left=2**63 - 1, window_right=2**63 - 1), BUDGET)
        assert_same_bits(want, case.run(x, grad=False, window_left=case.length - 1, window_right=3), BUDGET)
        assert_same_bits(want, case.run(x, grad=False, key_padding_mask=ones), BUDGET)
        full = case.run(x, grad=False, causal=False)
        for window in (case.length, 2**40, 2**63 - 1):
            wide = case.run(x, grad=False, causal=False, window_left=window, window_right=window)
            assert_same_bits(full, wide, BUDGET)
        must_differ(want, full)


@pytest.mark.parametrize(
    "features", [{"window_left": 128}, {"softcap": 12.0}, {"sinks": True}], ids=lambda f: next(iter(f))
)
def test_features_decode_as_they_prefill(case: Case, features: dict) -> None:
    """Decode against prefill again with each feature on, the keys before the window poisoned as an evicted cache's."""
    for x in case.each(1, 40, case.length):
        options = dict(features)
        if options.pop("sinks", False):
            options["sinks"] = torch.linspace(-1, 1, case.heads[0], device=case.device)
        whole = attention(x["q"], x["k"], x["v"], backend=case.backend, **options)
        for i in (0, 17, 39):
            end = case.length - 39 + i
            k, v = x["k"][:, :, :end].clone(), x["v"][:, :, :end].clone()
            if "window_left" in options:
                k[:, :, : end - 129] = v[:, :, : end - 129] = NAN
            got = attention(x["q"][:, :, i : i + 1], k, v, backend=case.backend, **options)
            assert differing(whole[0][:, :, i : i + 1], got[0]) == 0
            assert differing(whole[1][:, :, i : i + 1], got[1]) == 0
        plain = attention(x["q"], x["k"], x["v"], backend=case.backend)
        assert differing(whole[0], plain[0]) > 0


def test_lse_request(case: Case) -> None:
    for x in case.each(1, case.queries, case.length):
        import detattn

        out, _ = attention(x["q"], x["k"], x["v"], backend=case.backend)
        alone = detattn.attention(x["q"], x["k"], x["v"], backend=case.backend)
        assert differing(out, alone) == 0
        assert differing(out, attention(x["q"], x["v"], x["k"], backend=case.backend)[0]) > 0


@pytest.mark.skipif(sys.platform == "win32", reason="no compiler set up there")
def test_execution_compiled(device: str) -> None:
    backend = "cuda" if device == "cuda" else "cpu"
    case = Case(backend, device)
    x = case.inputs(2, 70, 200, 0, case.dtypes[-1], 64)
    eager = case.run(x)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, backend=backend), fullgraph=True)
    got = run(compiled, *x.values(), grad=case.grad)
    assert_same_bits(eager, got, BUDGET)
    must_differ(eager, nudge(got))


def test_execution_threads(device: str, backend: str, threads: None) -> None:
    if device != "cpu":
        pytest.skip("threads are the CPU's")
    case = Case(backend, device)
    for x in case.each(2, case.queries, case.length):
        torch.set_num_threads(1)
        want = case.run(x)
        for n in (2, 3, 5):
            torch.set_num_threads(n)
            assert_same_bits(want, case.run(x), BUDGET)
        must_differ(want, nudge(want))


def test_execution_denormal_mode(device: str) -> None:
    """Inputs and results around the smallest normal number, with the caller's flush-to-zero on and off."""
    if device != "cpu":
        pytest.skip("the mode is the CPU's")
    x = generate(Shape(2, 4, 2, 60, 200, 32), torch.float32, seed=0)
    x["v"] = x["v"] * 1e-38
    want = run(attention, x["q"], x["k"], x["v"])
    assert ((want["out"].abs() < 1.2e-38) & (want["out"] != 0)).any()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush")
    try:
        got = run(attention, x["q"], x["k"], x["v"])
    finally:
        torch.set_flush_denormal(False)
    assert_same_bits(want, got, BUDGET)


@settings(deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_cut_of_any_shape(device: str, data: st.DataObject) -> None:
    backend = "cuda" if device == "cuda" else "cpu"
    kv, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 3, 4, 8]))
    queries, extra = data.draw(st.integers(1, 150)), data.draw(st.integers(0, 600))
    dtype = (
        torch.bfloat16
        if device == "cuda"
        else data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    )
    shape = Shape(2, kv * group, kv, queries, queries + extra, 8 * data.draw(st.integers(1, 17)))
    spread = data.draw(st.sampled_from([0.3, 1.0, 4.0]))
    x = generate(shape, dtype, seed=data.draw(st.integers(0, 9)), device=device, spread=spread)
    whole = attention(x["q"], x["k"], x["v"], backend=backend)
    count = data.draw(st.integers(1, queries))
    start = data.draw(st.integers(0, queries - count))
    end = extra + start + count
    got = attention(x["q"][1:, :, start : start + count], x["k"][1:, :, :end], x["v"][1:, :, :end], backend=backend)
    for mine, part in zip(whole, got, strict=True):
        assert differing(mine[1:, :, start : start + count], part) == 0


BY_PROMISE = {
    "rerun": test_rerun,
    "batch-size": test_batch_size_and_position,
    "batch-position": test_batch_size_and_position,
    "neighbours": test_neighbours,
    "chunked-prefill": test_chunked_prefill,
    "decode": test_decode,
    "right-padding": test_padding,
    "left-padding": test_padding,
    "packed": test_packed,
    "paged": test_paged,
    "layout": test_layout,
    "heads": test_heads,
    "bounds": test_bounds,
    "mask-neutral": test_mask_neutral,
    "execution": test_execution_compiled,
    "lse-request": test_lse_request,
}


def test_every_promise_has_a_test() -> None:
    assert set(BY_PROMISE) == {p.id for p in contract.PROMISES}
    assert all(inspect.isfunction(f) for f in BY_PROMISE.values())
