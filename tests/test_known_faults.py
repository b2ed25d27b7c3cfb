"""Faults that attention kernels of this world have had, as tests: invariance, masks, caches, layouts.

Each test is named after the kind of fault. Gradients: ``test_known_gradient_faults.py``. What engines and modes of
PyTorch do: ``test_serving.py``, ``test_op.py``.
"""

from __future__ import annotations

import random

import pytest
import torch
from common import assert_same_bits, attention, differing, error, offsets, pack, paged, varlen
from oracle import one
from test_serving import Bits, inputs, paged_call
from torch import Tensor

import detattn
from detattn.harness import tolerance

NAN = float("nan")
BOTH = (torch.bfloat16, torch.float16)
Part = tuple[Tensor, Tensor, Tensor]  # of one sequence: q [Hq, n, D], k and v [Hkv, S, D]


def parts(device: str, sizes: list[tuple[int, int]], heads: tuple[int, int] = (4, 2), dim: int = 64, seed: int = 0,
          dtype: torch.dtype = torch.bfloat16) -> list[Part]:  # fmt: skip
    """Sequences of (queries, keys)."""
    made = []
    for i, (n, s) in enumerate(sizes):
        q, k, v = inputs(device, 1, *heads, n, s, dim, seed=seed + i, dtype=dtype)
        made.append((q[0], k[0], v[0]))
    return made


def alone(part: Part, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = attention(*(t[None] for t in part), **options)
    return pack(out[0]), lse[0]


def packed_call(of: list[Part], **options: object) -> tuple[Tensor, Tensor]:
    device = str(of[0][0].device)
    cu = [offsets([p[n].shape[1] for p in of], device) for n in (0, 1)]
    return varlen(*(torch.cat([pack(p[n]) for p in of]) for n in range(3)), *cu, **options)


def compare_each(bits: Bits, of: list[Part], got: tuple[Tensor, Tensor], want: list[tuple[Tensor, Tensor]]) -> None:
    at = 0
    for part, (out, lse) in zip(of, want, strict=True):
        rows = slice(at, at + part[0].shape[1])
        at = rows.stop
        bits.compare((out, got[0][rows]), (lse, got[1][:, rows]))


def accurate(got: Tensor, want: Tensor, plain: Tensor, dtype: torch.dtype) -> bool:
    return tolerance(dtype).allows(error(got, want), error(plain, want))


@pytest.mark.parametrize("page_size", [16, 128])
def test_a_long_prefill_changes_how_its_neighbours_decode(device: str, page_size: int) -> None:
    decode, prefill = parts(device, [(1, 1300), (129, 1300)])
    want = [alone(decode), alone(prefill)]
    bits = Bits(device)
    for of, expected in (([decode], want[:1]), ([decode, prefill], want), ([prefill, decode], want[::-1])):
        compare_each(bits, of, paged_call(of, page_size, seed=1), expected)
    assert bits.count() == 0
    bits.compare((want[0][0], want[1][0][-1:]))
    assert bits.count() > 0


def test_a_tile_chosen_by_the_average_length(device: str) -> None:
    of = parts(device, [(512, 600), *((1, 90 + i) for i in range(63))])
    want, bits = [alone(p) for p in of], Bits(device)
    compare_each(bits, of, packed_call(of), want)
    assert bits.count() == 0


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=["mha", "gqa"])
def test_a_split_count_from_the_whole_batch(device: str, heads: tuple[int, int]) -> None:
    of = parts(device, [(1 + i % 3, 40 + 167 * i) for i in range(16)], heads)
    want, bits = [alone(p) for p in of], Bits(device)
    for n in (1, 2, 3, 8, 16):
        compare_each(bits, of[:n], packed_call(of[:n]), want[:n])
        compare_each(bits, of[:n], paged_call(of[:n], 16, seed=n), want[:n])
    assert bits.count() == 0
    bits.compare((want[0][0][:1], want[1][0][:1]))
    assert bits.count() > 0


def test_a_split_count_that_depends_on_the_length(device: str) -> None:
    length = 4096
    ((q, k, v),) = parts(device, [(length, length)], (2, 1), 128)
    want, bits = alone((q, k, v)), Bits(device)
    for p in (1, 63, 64, 65, 127, 128, 129, 1023, 2047, 4095):
        got = alone((q[:, p : p + 1], k[:, : p + 1], v[:, : p + 1]))
        bits.compare((want[0][p : p + 1], got[0]), (want[1][:, p : p + 1], got[1]))
    assert bits.count() == 0


@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_decode_in_another_order_than_prefill(device: str, length: int) -> None:
    ((q, k, v),) = parts(device, [(130, length)], (2, 1), 128, seed=length)
    want, bits = alone((q, k, v)), Bits(device)
    for i in (0, 1, 64, 127, 129):
        end = length - 129 + i
        got = alone((q[:, i : i + 1], k[:, :end], v[:, :end]))
        bits.compare((want[0][i : i + 1], got[0]), (want[1][:, i : i + 1], got[1]))
    assert bits.count() == 0


@pytest.mark.parametrize("sinks", [False, True])
def test_a_threshold_of_the_batch_size(device: str, sinks: bool) -> None:
    of = parts(device, [(1, 700 if i != 1 else 7000) for i in range(64)], (8, 1))
    extra = {"sinks": torch.linspace(-2, 2, 8, device=device)} if sinks else {}
    want, bits = [alone(p, **extra) for p in of], Bits(device)
    for n in [*range(1, 17), 31, 32, 33, 64]:
        compare_each(bits, of[:n], packed_call(of[:n], **extra), want[:n])
    assert bits.count() == 0
    bits.compare((want[0][0], want[2][0]))
    assert bits.count() > 0


def test_prompts_cut_in_other_places(device: str) -> None:
    length, page_size = 1500, 16
    (whole,) = parts(device, [(length, length)])
    q, k, v = whole
    want, bits = alone(whole), Bits(device)
    cuts = [[length], [1024, 476], [248, 1024, 228], [1] * 32 + [length - 32]]
    cuts += [[1000 + i, 500 - i] for i in range(page_size + 1)]
    for cut in cuts:
        at = 0
        for n in cut:
            part = (q[:, at : at + n], k[:, : at + n], v[:, : at + n])
            got = paged_call([part], page_size, seed=n)
            bits.compare((want[0][at : at + n], got[0]), (want[1][:, at : at + n], got[1]))
            at += n
    assert bits.count() == 0


def test_a_burst_of_mixed_requests_in_any_order(device: str) -> None:
    of = parts(device, [(900, 900), *((1, 100 + 31 * i) for i in range(40)), *((17 + i, 17 + i) for i in range(5))])
    want, bits = [alone(p) for p in of], Bits(device)
    for seed in range(20 if device == "cuda" else 3):
        order = random.Random(seed).sample(range(len(of)), len(of))
        shuffled = [of[i] for i in order]
        compare_each(bits, shuffled, packed_call(shuffled), [want[i] for i in order])
    assert bits.count() == 0


@pytest.mark.parametrize("dtype", [torch.float32, *BOTH], ids=str)
def test_only_the_longest_padded_row_is_right(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and dtype is torch.float32:
        pytest.skip("the CUDA kernels take bf16 and fp16")
    lengths = [200, 3, 128, 77]
    q, k, v = inputs(device, 4, 4, 2, 200, 200, 64, dtype=dtype)
    keep = torch.arange(200, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    dense, bits = attention(q, k, v, key_padding_mask=keep, causal=False), Bits(device)
    of = [(q[b, :, :n], k[b, :, :n], v[b, :, :n]) for b, n in enumerate(lengths)]
    want = [alone(p, causal=False) for p in of]
    compare_each(bits, of, packed_call(of, causal=False), want)
    for b, n in enumerate(lengths):
        # Bottom-right alignment counts the padding, so only masks without a diagonal line up with it.
        bits.compare((pack(dense[0][b, :, :n]), want[b][0]), (dense[1][b, :, :n], want[b][1]))
    assert bits.count() == 0


def test_a_window_of_zero_taken_for_none(device: str) -> None:
    q, k, v = inputs(device, 1, 4, 2, 40, 40, 64)
    out, _ = attention(q, k, v, window_left=0)
    assert differing(out, v.repeat_interleave(2, 1)) == 0


def test_a_one_token_sequence(device: str) -> None:
    for dim in (16, 64, 128):
        q, k, v = inputs(device, 1, 1, 1, 1, 1, dim)
        out, lse = attention(q, k, v)
        assert differing(out, v) == 0
        assert torch.isfinite(lse).all()


def test_more_queries_than_keys_under_a_causal_mask(device: str) -> None:
    q, k, v = inputs(device, 1, 2, 1, 2048, 1024, 64)
    out, lse = attention(q, k, v)
    assert (out[:, :, :1024] == 0).all() and torch.isneginf(lse[:, :, :1024]).all()
    square = attention(q[:, :, 1024:], k, v)
    assert_same_bits({"out": out[:, :, 1024:], "lse": lse[:, :, 1024:]}, {"out": square[0], "lse": square[1]})


def test_causal_from_the_wrong_corner(device: str) -> None:
    q, k, v = inputs(device, 1, 1, 1, 3, 7, 64)
    for dtype in (torch.float64, torch.bfloat16):
        truth = one(q[0], k[0], v[0], dtype=dtype)
        if dtype is torch.float64:
            want = truth
    explicit = torch.tensor([[1] * 5 + [0] * 2, [1] * 6 + [0], [1] * 7], dtype=torch.bool, device=device)
    score = (q[0].double() @ k[0].double().transpose(1, 2)) / 8
    weight = score.masked_fill(~explicit, -torch.inf).softmax(-1)
    assert error(want[0], weight @ v[0].double()) < 1e-12
    (part,) = [(q[0], k[0], v[0])]
    for got in (alone(part), packed_call([part]), paged_call([part], 4, seed=0)):
        assert accurate(got[0], pack(want[0]), pack(truth[0]), torch.bfloat16)


def test_a_block_wholly_in_the_future(device: str) -> None:
    for length in (4097, 8192):
        q, k, v = inputs(device, 1, 1, 1, length, length, 64, seed=length)
        out, lse = attention(q, k, v)
        assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_poisoned_slots_and_stale_table_entries(device: str) -> None:
    """``paged_call`` fills unused slots with NaN and unused entries with -7; other users' pages are poisoned too."""
    of = parts(device, [(1, 17), (3, 1040), (1, 1), (200, 333)])
    want, bits = [alone(p) for p in of], Bits(device)
    for page_size in (1, 16, 32, 64, 128, 256):
        compare_each(bits, of, paged_call(of, page_size, seed=page_size), want)
    assert bits.count() == 0


def test_a_used_page_that_does_not_exist(device: str) -> None:
    (part,) = parts(device, [(1, 40)])
    cache_k, cache_v = (paged(part[n], 16, [0, 1, 2]) for n in (1, 2))
    used = torch.tensor([40], dtype=torch.int32, device=device)
    for wrong in (-1, cache_k.shape[0]):
        table = torch.tensor([[0, wrong, 2]], dtype=torch.int32, device=device)
        call = {"block_table": table, "seqused_k": used, "check_indices": True}
        with pytest.raises(ValueError, match=rf"block_table\[0, 1\] is {wrong}"):
            detattn.attention_varlen(pack(part[0]), cache_k, cache_v, offsets([1], device), **call)


def test_steps_of_a_long_decode_never_give_nan(device: str) -> None:
    steps = 300 if device == "cuda" else 40
    q, k, v = inputs(device, 4, 4, 2, steps, 1000 + steps, 64)
    whole, bits = attention(q, k, v), Bits(device)
    page_size, pages = 16, -(-(1000 + steps) // 16)
    caches = [torch.cat([paged(t[b], page_size, list(range(pages)))[:pages] for b in range(4)]) for t in (k, v)]
    table = torch.arange(4 * pages, dtype=torch.int32, device=device).view(4, pages)
    for i in range(steps):
        n = 1 + i % 4
        used = torch.full((n,), 1001 + i, dtype=torch.int32, device=device)
        got = varlen(q[:n, :, i], *caches, offsets([1] * n, device), block_table=table[:n], seqused_k=used)
        bits.compare((whole[0][:n, :, i], got[0]), (whole[1][:n, :, i].T, got[1]))
    assert bits.count() == 0
    assert not torch.isnan(got[0]).any()


def test_a_cache_cut_from_a_larger_tensor(device: str) -> None:
    """Layers, and K beside V, in one tensor: pages lie far apart, slots are not contiguous."""
    (part,) = parts(device, [(2, 500)], (4, 2), 128)
    pool = torch.full((12, 3, 64, 2, 2, 128), NAN, dtype=torch.bfloat16, device=device)  # page, layer, slot, k/v, H, D
    order = random.Random(0).sample(range(12), 8)
    for side, n in enumerate((1, 2)):
        pool[order, 1, :, side] = paged(part[n], 64, list(range(8)))[:8]
    table = torch.tensor([order], dtype=torch.int32, device=device)
    used = torch.tensor([500], dtype=torch.int32, device=device)
    got = varlen(
        pack(part[0]), pool[:, 1, :, 0], pool[:, 1, :, 1], offsets([2], device), block_table=table, seqused_k=used
    )
    want = alone(part)
    assert differing(want[0], got[0]) == 0 and differing(want[1], got[1]) == 0


def test_values_that_are_a_transposed_view(device: str) -> None:
    q, k, v = inputs(device, 1, 16, 16, 62, 62, 128)
    want = attention(q, k, v)
    views = {
        "heads inside": v.transpose(1, 2).contiguous().transpose(1, 2),
        "dim outside": v.transpose(2, 3).contiguous().transpose(2, 3),
        "every other": torch.stack([v, v * NAN], -1).flatten(-2)[..., ::2],
    }
    for name, view in views.items():
        assert not view.is_contiguous(), name
        got = attention(q, k, view)
        assert differing(want[0], got[0]) == 0 and differing(want[1], got[1]) == 0, name
    k1, v1 = k[:, :1].expand(-1, 16, -1, -1), v[:, :1].expand(-1, 16, -1, -1)
    assert differing(attention(q, k1, v1)[0], attention(q, k[:, :1], v[:, :1])[0]) == 0


def test_offsets_that_end_before_the_rows_do(device: str) -> None:
    """Rows past the last sequence are nobody's: out 0, lse -inf, never read as keys."""
    of = parts(device, [(300, 300), (186, 186)])
    want, bits = [alone(p) for p in of], Bits(device)
    rows = [torch.cat([*(pack(p[n]) for p in of), torch.full_like(pack(of[0][n])[:212], NAN)]) for n in range(3)]
    cu = offsets([300, 186], device)
    out, lse = varlen(*rows, cu, cu)
    compare_each(bits, of, (out[:486], lse[:, :486]), want)
    assert bits.count() == 0
    assert out.shape[0] == 698 and (out[486:] == 0).all() and torch.isneginf(lse[:, 486:]).all()


@pytest.mark.parametrize("sizes", [
    (4, 1, 256, [0, 1208, 840, 0], [2538, 1742, 840, 3072]),
    (9, 3, 64, [0, 1, 0, 1], [5, 9, 0, 700]),
    (21, 7, 120, [0, 0, 0, 1], [3, 0, 4, 30]),
], ids=["queries without", "one query or none", "fewer rows than sequences"])  # fmt: skip
def test_sequences_without_queries(device: str, sizes: tuple) -> None:
    hq, hkv, dim, queries, keys = sizes
    of = parts(device, list(zip(queries, keys, strict=True)), (hq, hkv), dim)
    want, bits = [alone(p) for p in of], Bits(device)
    compare_each(bits, of, packed_call(of), want)
    assert bits.count() == 0


def test_a_sink_beside_no_keys(device: str) -> None:
    (empty, full) = parts(device, [(2, 0), (2, 50)])
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse = packed_call([empty, full], sinks=sinks)
    assert (out[:2] == 0).all() and torch.equal(lse[:, :2], sinks[:, None].expand(-1, 2))
    want = alone(full, sinks=sinks)
    assert differing(want[0], out[2:]) == 0 and differing(want[1], lse[:, 2:]) == 0


@pytest.mark.parametrize("scale", [0.0, -0.1, NAN])
def test_a_scale_that_is_not_positive(device: str, scale: float) -> None:
    q, k, v = inputs(device, 1, 1, 1, 2, 2, 64)
    with pytest.raises(ValueError, match="scale is"):
        detattn.attention(q, k, v, scale=scale)
    with pytest.raises(TypeError, match="tensor"):
        detattn.attention(q, k, v, scale=torch.tensor(1.0))


def test_a_head_dim_that_is_padded_inside(device: str) -> None:
    """The scale is that of the head dim that came, not of the one a kernel pads to."""
    for dim in (40, 72, 96, 120):
        q, k, v = inputs(device, 1, 2, 1, 30, 30, dim)
        want, plain = (one(q[0], k[0], v[0], dtype=t)[0] for t in (torch.float64, torch.bfloat16))
        assert accurate(attention(q, k, v)[0][0], want, plain, torch.bfloat16)


def test_65536_of_anything(device: str) -> None:
    for batch, heads in ((65_535, 1), (65_536, 1), (70_000, 1), (1, 65_536)):
        q, k, v = (torch.randn(batch, heads, n, 8, device=device).to(torch.bfloat16) for n in (1, 2, 2))
        out, lse = attention(q, k, v)
        assert not torch.isnan(out).any() and torch.isfinite(lse).all()
        end = attention(q[-1:, -1:], k[-1:, -1:], v[-1:, -1:])
        assert differing(out[-1:, -1:], end[0]) == 0 and differing(lse[-1:, -1:], end[1]) == 0


def test_the_other_layout(device: str) -> None:
    """``[B, S, H, D]`` passed as ``[B, H, S, D]``: refused where the heads do not divide, with the likely cause."""
    q, k, v = (torch.randn(1, 71, h, 64, device=device).bfloat16() for h in (3, 2, 2))
    with pytest.raises(ValueError, match=r"one batch size|transpose"):
        detattn.attention(q, k[:, :30], v[:, :30])
    with pytest.raises(ValueError, match="transpose"):
        detattn.attention(q, k[:, :70], v[:, :70])
