"""Faults that backwards of this world have had, as tests. Each is named after the kind of fault."""

from __future__ import annotations

import pytest
import torch
from common import attention, differing, error, offsets, pack, raw, run, upstream, varlen
from conftest import serves
from oracle import dense, one
from test_serving import Bits, inputs
from torch import Tensor

from detattn.harness import tolerance

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def has_backward(device: str) -> None:
    if not serves(device, device, BF16, backward=True):
        pytest.skip("no backward on this device")


def reruns(device: str) -> int:
    return 500 if device == "cuda" else 5


def against_fp64(
    got: dict[str, Tensor], x: tuple[Tensor, ...], sinks: Tensor | None = None, dlse: bool = True, **options: object
) -> None:
    """Gradients of a dense call within a multiple of the error of plain PyTorch in the same dtype."""
    found = []
    for kind in (torch.float64, x[0].dtype):
        leaves = [t.detach().to(kind).requires_grad_() for t in (*x, *(() if sinks is None else (sinks,)))]
        out, lse = dense(*leaves[:3], None, None if sinks is None else leaves[3], dtype=kind, **options)
        ups = [upstream(got["out"], 1).to(kind), torch.where(torch.isfinite(lse), upstream(got["lse"], 2).to(kind), 0)]
        found.append(torch.autograd.grad([out, lse], leaves, ups if dlse else [ups[0], torch.zeros_like(ups[1])]))
    for name, truth, plain in zip(("dq", "dk", "dv", "dsinks"), *found, strict=False):
        budget = tolerance(x[0].dtype, "backward")
        assert not torch.isnan(got[name]).any(), name
        assert budget.allows(error(got[name], truth), error(plain, truth)), (name, error(got[name], truth))


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(2, 12, 12, 1024, 64), (2, 8, 8, 512, 64), (1, 8, 2, 700, 128)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_that_vary_from_run_to_run(device: str, sizes: tuple[int, ...], causal: bool, dtype) -> None:
    """Beside a busy stream, with memory that earlier holders left full of NaN."""
    b, hq, hkv, n, d = sizes if device == "cuda" else (1, 2, 1, 150, 64)
    x = inputs(device, b, hq, hkv, n, n, d, dtype=dtype)
    ups = {"dout": upstream(x[0], 1), "dlse": upstream(x[0][..., 0].float(), 2)}
    first, bits = run(attention, *x, causal=causal, **ups), Bits(device)
    if device == "cuda":
        noise, side = torch.randn(1 << 26, device=device), torch.cuda.Stream()
    for i in range(reruns(device)):
        if device == "cuda" and i % 20 == 0:
            with torch.cuda.stream(side):
                for _ in range(10):
                    noise.mul_(1.0001)
        torch.full((1 << 20,), float("nan"), device=device)
        again = run(attention, *x, causal=causal, **ups)
        bits.compare(*((first[name], again[name]) for name in first))
    assert bits.count() == 0
    raw(again["dk"]).view(-1)[5] ^= 1
    bits.compare((first["dk"], again["dk"]))
    assert bits.count() == 1


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (8, 1)], ids=["mha", "group of 4", "group of 8"])
def test_a_gradient_that_depends_on_the_batch(device: str, heads: tuple[int, int]) -> None:
    n = 300 if device == "cuda" else 140
    q, k, v = inputs(device, 16, *heads, n, n, 64)
    dout, dlse = upstream(q, 1), upstream(q[..., 0].float(), 2)
    bits = Bits(device)
    alone = [run(attention, *(t[b : b + 1] for t in (q, k, v)), dout=dout[b : b + 1], dlse=dlse[b : b + 1])
             for b in range(16)]  # fmt: skip
    for batch in (1, 2, 4, 16):
        got = run(attention, q[:batch], k[:batch], v[:batch], dout=dout[:batch], dlse=dlse[:batch])
        for name in got:
            bits.compare((torch.cat([a[name] for a in alone[:batch]]), got[name]))
    assert bits.count() == 0
    bits.compare((alone[0]["dk"], alone[1]["dk"]))
    assert bits.count() > 0


@pytest.mark.parametrize("count", [1, 2, 17])
@pytest.mark.parametrize("heads", [(4, 1), (8, 1)], ids=str)
def test_semaphores_sized_for_another_batch(device: str, count: int, heads: tuple[int, int]) -> None:
    lengths = [(37 * i) % 290 + 1 for i in range(count)]
    q, k, v = (pack(t[0]).contiguous() for t in inputs(device, 1, *heads, sum(lengths), sum(lengths), 64))
    cu = offsets(lengths, device)
    got = run(varlen, q, k, v, cu_q=cu, cu_k=cu)
    dout, dlse, bits = upstream(got["out"], 1), upstream(got["lse"], 2), Bits(device)
    for b in range(count):
        at = slice(sum(lengths[:b]), sum(lengths[: b + 1]))
        up = {"dout": pack(dout[at])[None], "dlse": dlse[:, at][None]}
        alone = run(attention, *(pack(t[at])[None] for t in (q, k, v)), **up)
        bits.compare(*((pack(alone[n][0]), got[n][at]) for n in ("out", "dq", "dk", "dv")))
    assert bits.count() == 0


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_that_leaves_blocks_without_a_turn(device: str, causal: bool) -> None:
    """Where blocks wait for each other, those outside the window must not be waited for."""
    n = 4096 if device == "cuda" else 520
    x = inputs(device, 1, 2, 1, n, n, 64)
    window = {"window_left": 128, "window_right": -1 if causal else 60, "causal": causal}
    got = run(attention, *x, **window)
    against_fp64(got, x, **window)


def test_strict_determinism_is_accepted(device: str) -> None:
    x = inputs(device, 1, 4, 2, 60, 60, 64)
    want = run(attention, *x)
    for warn_only in (False, True):
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        try:
            got = run(attention, *x)
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(differing(want[n], got[n]) == 0 for n in want)


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_one_token(device: str, dim: int) -> None:
    x = inputs(device, 1, 1, 1, 1, 1, dim)
    dout = upstream(x[0], 3)
    got = run(attention, *x, dout=dout, dlse=torch.zeros(1, 1, 1, device=device))
    assert differing(got["out"], x[2]) == 0 and differing(got["dv"], dout) == 0
    # dP - delta is the difference of two sums in different orders.
    assert got["dq"].abs().max() < 1e-6 and got["dk"].abs().max() < 1e-6


def test_rows_above_the_causal_corner(device: str) -> None:
    n, s = (2048, 1024) if device == "cuda" else (200, 100)
    x = inputs(device, 1, 2, 1, n, s, 64)
    got = run(attention, *x)
    assert (got["dq"][:, :, : n - s] == 0).all()
    against_fp64(got, x)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_gradient_of_lse_dropped(device: str, with_sinks: bool) -> None:
    x = inputs(device, 2, 4, 2, 130, 150, 64)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(3)).to(device) if with_sinks else None
    got = run(attention, *x, sinks)
    against_fp64(got, x, sinks)
    ignored = run(attention, *x, sinks, dlse=torch.zeros_like(got["lse"]))
    assert differing(got["dq"], ignored["dq"]) > 0 and differing(got["dk"], ignored["dk"]) > 0


def test_a_sink_gradient_that_depends_on_other_things(device: str) -> None:
    x = inputs(device, 3, 4, 2, 200, 200, 64)
    sinks = torch.linspace(-1, 2, 4, device=device)
    ups = {"dout": upstream(x[0], 1), "dlse": upstream(x[0][..., 0].float(), 2)}
    want = run(attention, *x, sinks, **ups)
    bits = Bits(device)
    for _ in range(50 if device == "cuda" else 3):
        bits.compare((want["dsinks"], run(attention, *x, sinks, **ups)["dsinks"]))
    assert bits.count() == 0


@pytest.mark.parametrize("layout", ["expanded scalar", "transposed", "permuted"])
def test_upstream_gradients_of_odd_strides(device: str, layout: str) -> None:
    x = inputs(device, 2, 4, 2, 70, 70, 64)
    dlse = torch.zeros(2, 4, 70, device=device)
    if layout == "expanded scalar":
        dout = torch.ones((), dtype=BF16, device=device).expand(2, 4, 70, 64)
    elif layout == "transposed":
        dout = upstream(x[0].transpose(1, 2), 1).transpose(1, 2)
    else:
        dout = upstream(x[0].permute(3, 0, 2, 1), 1).permute(1, 3, 2, 0)
    got = run(attention, *x, dout=dout, dlse=dlse)
    want = run(attention, *x, dout=dout.clone(memory_format=torch.contiguous_format), dlse=dlse)
    assert all(differing(want[n], got[n]) == 0 for n in want)


@pytest.mark.parametrize("dim", [40, 72, 96])
def test_a_scale_of_the_padded_head_dim(device: str, dim: int) -> None:
    x = inputs(device, 1, 2, 1, 100, 100, dim)
    against_fp64(run(attention, *x), x)


@pytest.mark.parametrize("softcap", [30.0, 50.0])
@pytest.mark.parametrize("window", [-1, 40])
def test_a_softcap_without_its_derivative(device: str, softcap: float, window: int) -> None:
    q, k, v = inputs(device, 1, 2, 1, 150, 150, 64)
    x = (q * 12, k, v)
    options = {"softcap": softcap, "window_left": window}
    against_fp64(run(attention, *x, **options), x, **options)


@pytest.mark.parametrize("dim", [128, 256])
def test_sequences_without_queries_get_no_gradient(device: str, dim: int) -> None:
    cu_q, cu_k = offsets([0, 1208, 840, 0], device), offsets([2538, 1742, 840, 3072], device)
    if device == "cpu":
        cu_q, cu_k = offsets([0, 12, 84, 0], device), offsets([25, 17, 84, 30], device)
    q = pack(inputs(device, 1, 4, 1, int(cu_q[-1]), 1, dim)[0][0]).contiguous()
    k, v = (pack(t[0]).contiguous() for t in inputs(device, 1, 1, 1, 1, int(cu_k[-1]), dim)[1:])
    got = run(varlen, q, k, v, cu_q=cu_q, cu_k=cu_k)
    for b in (0, 3):
        unused = slice(int(cu_k[b]), int(cu_k[b + 1]))
        assert (got["dk"][unused] == 0).all() and (got["dv"][unused] == 0).all()
    assert all(torch.isfinite(t).all() for n, t in got.items() if n != "lse")
    rows, keys = slice(int(cu_q[1]), int(cu_q[2])), slice(int(cu_k[1]), int(cu_k[2]))
    alone = run(
        attention,
        *(pack(t)[None] for t in (q[rows], k[keys], v[keys])),
        dout=pack(upstream(got["out"], 1)[rows])[None],
        dlse=upstream(got["lse"], 2)[:, rows][None],
    )
    assert differing(pack(alone["dk"][0]), got["dk"][keys]) == 0
    assert differing(pack(alone["dq"][0]), got["dq"][rows]) == 0


def test_nan_at_few_tokens(device: str) -> None:
    for dim in (64, 128):
        for n in range(1, 34, 1 if device == "cuda" else 8):
            x = inputs(device, 2, 2, 1, n, n, dim, seed=n)
            got = run(attention, *x)
            assert not any(torch.isnan(t).any() for t in got.values()), n


def test_an_empty_row_that_poisons_the_others(device: str) -> None:
    q, k, v = inputs(device, 2, 4, 2, 40, 60, 64)
    keep = torch.ones(2, 60, dtype=torch.bool, device=device)
    keep[0] = False
    keep[1, :5] = False
    got = run(attention, q, k, v, key_padding_mask=keep)
    assert (got["out"][0] == 0).all() and torch.isneginf(got["lse"][0]).all()
    for name in ("dq", "dk", "dv"):
        assert (got[name][0] == 0).all() and torch.isfinite(got[name]).all(), name
    assert (got["dk"][1, :, :5] == 0).all() and (got["dv"][1, :, :5] == 0).all()
    want = [t.detach().double().requires_grad_() for t in (q[1], k[1], v[1])]
    out, _ = one(*want, keep[1])
    expected = torch.autograd.grad(out, want, upstream(got["out"], 1)[1].double())
    alone = run(attention, q, k, v, key_padding_mask=keep, dlse=torch.zeros(2, 4, 40, device=device))
    for name, truth in zip(("dq", "dk", "dv"), expected, strict=True):
        assert error(alone[name][1], truth) < 0.02, name
