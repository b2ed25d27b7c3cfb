"""Errors against fp64, within a multiple of what plain PyTorch in the same dtype makes on the same inputs."""

from __future__ import annotations

import math

import pytest
import torch
from common import attention, error, offsets, pack, paged, run, upstream, varlen
from conftest import serves
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import dense, one

from detattn.backends.reference import forward_fp32
from detattn.harness import Shape, generate, tolerance

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def gradients(out, lse, leaves, dout, dlse):
    dlse = torch.where(torch.isfinite(lse), dlse.to(lse.dtype), 0.0)
    return torch.autograd.grad([out, lse], leaves, [dout.to(out.dtype), dlse], allow_unused=True)


def check(
    backend: str,
    device: str,
    shape: Shape,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    spread: float = 1.0,
    sinks=False,
    keep=None,
    **options,
) -> None:
    """One dense call, forward and (where the backend has one) backward, against the oracle and its dtype's budget."""
    if not serves(backend, device, dtype, shape.head_dim):
        pytest.skip("not served")
    grad = serves(backend, device, dtype, shape.head_dim, backward=True)
    x = generate(shape, dtype, seed=seed, device=device, spread=spread, sinks=sinks, keep=keep)
    mask, sink = x["key_padding_mask"], x["sinks"]
    got = run(attention, x["q"], x["k"], x["v"], sink, grad=grad, key_padding_mask=mask, backend=backend, **options)
    dout, dlse = upstream(got["out"], 1), upstream(got["lse"], 2)
    results = []
    for kind in (torch.float64, dtype):
        leaves = [x[n].detach().to(kind).requires_grad_() for n in ("q", "k", "v")]
        leaves += [sink.detach().to(kind).requires_grad_()] if sinks else []
        out, lse = dense(*leaves[:3], mask, leaves[3] if sinks else None, dtype=kind, **options)
        result = {"out": out, "lse": lse}
        if grad:
            names = ("dq", "dk", "dv", "dsinks")
            found = gradients(out, lse, leaves, dout, dlse)
            result |= {
                n: torch.zeros_like(t) if g is None else g for n, g, t in zip(names, found, leaves, strict=False)
            }
        results.append(result)
    truth, plain = results
    assert set(got) == set(truth)
    for name in truth:
        budget = tolerance(dtype, "forward" if name in ("out", "lse") else "backward")
        mine, peer = error(got[name], truth[name]), error(plain[name], truth[name])
        if name == "lse":
            # A logarithm near zero has no relative error to speak of; lse is fp32 whatever the inputs.
            budget = tolerance(torch.float64 if dtype is torch.float64 else torch.float32)
            mine, peer = error(got[name] + 8, truth[name] + 8), 0.0
        assert not torch.isnan(got[name]).any(), name
        assert budget.allows(mine, peer), f"{name}: error {mine:.2e}, plain {dtype} {peer:.2e}"


SHAPES = {
    "square": Shape(2, 4, 2, 150, 150),
    "tail": Shape(1, 6, 2, 37, 650),
    "more queries than keys": Shape(1, 4, 4, 140, 60),
    "decode": Shape(3, 8, 1, 1, 300),
}
OPTIONS: dict[str, dict] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_left": 50},
    "window of itself": {"window_left": 0},
    "two-sided window": {"causal": False, "window_left": 20, "window_right": 7},
    "softcap": {"softcap": 15.0},
    "padding": {"keep": 0.7},
    "sinks": {"sinks": True},
    "everything": {"softcap": 20.0, "sinks": True, "keep": 0.6, "window_left": 90, "scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_features(backend: str, device: str, shape: Shape, options: dict) -> None:
    dtypes = DTYPES if backend != "reference" else (torch.float32, torch.bfloat16)
    if backend == "reference" and shape.keys > 200:
        shape = Shape(1, 2, 1, min(shape.queries, 8), shape.keys, 16)
    for dtype in dtypes:
        if serves(backend, device, dtype, shape.head_dim):
            check(backend, device, shape, dtype, **options)


@pytest.mark.parametrize("head_dim", [1, 8, 33, 40, 64, 96, 128, 129, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_head_dims(backend: str, device: str, dtype: torch.dtype, head_dim: int) -> None:
    check(backend, device, Shape(1, 2, 1, 70, 200, head_dim), dtype)


@pytest.mark.parametrize("spread", [1e-3, 3.0, 10.0])
def test_flat_and_sharp_softmax(backend: str, device: str, spread: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        if serves(backend, device, dtype):
            check(backend, device, Shape(1, 2, 2, 90, 90), dtype, spread=spread)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 30.0])
def test_scales(backend: str, device: str, scale: float) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float64
    check(backend, device, Shape(1, 2, 1, 60, 80), dtype, scale=scale)


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_softcap_with_large_logits(backend: str, device: str, softcap: float) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    check(backend, device, Shape(1, 2, 1, 60, 80), dtype, softcap=softcap, spread=4.0, window_left=40)


def test_chunks_and_lazy_reference_far_apart(device: str) -> None:
    """Maxima that rise by more than the lazy threshold, within and across chunks; long enough for several chunks."""
    backend = "cuda" if device == "cuda" else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = generate(Shape(1, 2, 1, 8, 2300), dtype, seed=3, device=device)
    ramp = torch.linspace(0.2, 6.0, 2300, device=device).to(dtype)[:, None]
    out, lse = attention(x["q"], x["k"] * ramp, x["v"], backend=backend)
    want, want_lse = dense(x["q"], x["k"] * ramp, x["v"])
    plain, _ = dense(x["q"], x["k"] * ramp, x["v"], dtype=dtype)
    assert tolerance(dtype).allows(error(out, want), error(plain, want))
    assert error(lse, want_lse) < 1e-5


def test_a_row_that_sees_nothing(backend: str, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = generate(Shape(2, 4, 2, 5, 3), dtype, seed=1, device=device)
    mask = torch.ones(2, 3, dtype=torch.bool, device=device)
    mask[1] = False
    out, lse = attention(x["q"], x["k"], x["v"], key_padding_mask=mask, backend=backend)
    assert (out[0, :, :2] == 0).all() and (lse[0, :, :2] == -math.inf).all()
    assert torch.isfinite(lse[0, :, 2:]).all()
    assert (out[1] == 0).all() and (lse[1] == -math.inf).all()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], device=device)
    out, lse = attention(x["q"], x["k"], x["v"], key_padding_mask=mask, sinks=sinks, backend=backend)
    assert (out[1] == 0).all() and torch.allclose(lse[1], sinks[:, None].expand(4, 5))
    if serves(backend, device, dtype, backward=True):
        got = run(attention, x["q"], x["k"], x["v"], key_padding_mask=mask, backend=backend)
        assert all((got[n][1] == 0).all() for n in ("dq", "dk", "dv"))
        assert (got["dq"][0, :, :2] == 0).all()
        assert not any(torch.isnan(t).any() for n, t in got.items() if n != "lse")


def test_one_key(backend: str, device: str) -> None:
    """One query, one key: out is v, dv is dout, dq and dk are zero."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for dim in (16, 64, 128):
        x = generate(Shape(1, 1, 1, 1, 1, dim), dtype, seed=dim, device=device)
        grad = serves(backend, device, dtype, dim, backward=True)
        got = run(attention, x["q"], x["k"], x["v"], grad=grad, backend=backend)
        assert torch.equal(got["out"], x["v"])
        if grad:
            got = run(attention, x["q"], x["k"], x["v"], dlse=torch.zeros(1, 1, 1, device=device), backend=backend)
            assert torch.equal(got["dv"], upstream(got["out"], 1))
            assert got["dq"].abs().max() < 1e-5 and got["dk"].abs().max() < 1e-5


def test_empty_sizes(backend: str, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    grad = serves(backend, device, dtype, backward=True)
    for shape in (Shape(0, 4, 2, 5, 5), Shape(2, 4, 2, 0, 5), Shape(2, 4, 2, 5, 0), Shape(2, 4, 2, 0, 0)):
        x = generate(shape, dtype, seed=0, device=device)
        got = run(attention, x["q"], x["k"], x["v"], grad=grad, backend=backend)
        assert got["out"].shape == x["q"].shape and (got["out"] == 0).all()
        assert (got["lse"] == -math.inf).all()
        assert all((got[n] == 0).all() for n in got if n.startswith("d"))


@pytest.mark.parametrize("lengths_k", [None, [0, 130, 7, 40], [90, 1, 64, 0]], ids=["square", "skewed", "empty"])
def test_varlen(backend: str, device: str, lengths_k: list[int] | None) -> None:
    """Each sequence of a packed call, tail rows that belong to nobody, gradients included."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    lengths_q = [33, 0, 70, 5]
    lengths_k = lengths_q if lengths_k is None else lengths_k
    rows_q, rows_k = sum(lengths_q) + 6, sum(lengths_k) + 4
    x = generate(Shape(1, 4, 2, rows_q, 1, 32), dtype, seed=5, device=device)
    y = generate(Shape(1, 4, 2, 1, rows_k, 32), dtype, seed=6, device=device)
    q, k, v = pack(x["q"][0]), pack(y["k"][0]), pack(y["v"][0])
    q, k, v = q.clone(), k.clone(), v.clone()
    q[sum(lengths_q) :] = k[sum(lengths_k) :] = v[sum(lengths_k) :] = float("nan")
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k, device)
    grad = serves(backend, device, dtype, 32, backward=True)
    got = run(varlen, q, k, v, grad=grad, cu_q=cu_q, cu_k=cu_k, backend=backend)
    assert (got["out"][sum(lengths_q) :] == 0).all() and (got["lse"][:, sum(lengths_q) :] == -math.inf).all()
    dout, dlse = upstream(got["out"], 1), upstream(got["lse"], 2)
    for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        sq, sk = slice(int(cu_q[b]), int(cu_q[b]) + nq), slice(int(cu_k[b]), int(cu_k[b]) + nk)
        leaves = [t.detach().double().requires_grad_() for t in (q[sq], k[sk], v[sk])]
        out, lse = one(*(pack(t) for t in leaves))
        budget = 3e-2 if dtype is torch.bfloat16 else 3e-6
        assert error(got["out"][sq], pack(out)) < budget
        assert error(got["lse"][:, sq], lse) < 1e-5
        if not grad:
            continue
        want = gradients(out, lse, leaves, pack(dout[sq]).double(), dlse[:, sq].double())
        for name, g, part in zip(("dq", "dk", "dv"), want, (sq, sk, sk), strict=True):
            assert error(got[name][part], torch.zeros_like(got[name][part]) if g is None else g) < budget
    if grad:
        assert (got["dq"][sum(lengths_q) :] == 0).all()
        assert (got["dk"][sum(lengths_k) :] == 0).all() and (got["dv"][sum(lengths_k) :] == 0).all()


def test_seqused_k_limits_the_keys(backend: str, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = generate(Shape(1, 4, 2, 12, 100, 32), dtype, seed=8, device=device)
    q, k, v = pack(x["q"][0]), pack(x["k"][0]).clone(), pack(x["v"][0]).clone()
    used = torch.tensor([30, 11], dtype=torch.int32, device=device)
    k[30:60] = v[30:60] = k[71:] = v[71:] = float("nan")
    grad = serves(backend, device, dtype, 32, backward=True)
    cu_q, cu_k = offsets([5, 7], device), offsets([60, 40], device)
    got = run(varlen, q, k, v, grad=grad, cu_q=cu_q, cu_k=cu_k, seqused_k=used, backend=backend)
    for sq, sk in ((slice(0, 5), slice(0, 30)), (slice(5, 12), slice(60, 71))):
        out, _ = one(pack(q[sq]), pack(k[sk]), pack(v[sk]))
        assert error(got["out"][sq], pack(out)) < (3e-2 if dtype is torch.bfloat16 else 3e-6)
    if grad:
        for name in ("dk", "dv"):
            assert (got[name][30:60] == 0).all() and (got[name][71:] == 0).all()


def test_paged(backend: str, device: str) -> None:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = generate(Shape(1, 4, 2, 3, 50, 32), dtype, seed=9, device=device)
    order = [5, 0, 3, 2]
    table = torch.tensor([[*order, -7]], dtype=torch.int32, device=device)
    cache = [paged(t[0], 16, order) for t in (x["k"], x["v"])]
    used = torch.tensor([50], dtype=torch.int32, device=device)
    out, lse = varlen(pack(x["q"][0]), *cache, offsets([3], device), block_table=table, seqused_k=used, backend=backend)
    want, want_lse = one(x["q"][0], x["k"][0], x["v"][0])
    assert error(out, pack(want)) < (3e-2 if dtype is torch.bfloat16 else 3e-6)
    assert error(lse, want_lse) < 1e-5


def test_golden_path_ignores_autocast_and_dtype() -> None:
    x = generate(Shape(1, 4, 2, 40, 60), torch.bfloat16, seed=2)
    q, k, v = x["q"], x["k"], x["v"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = forward_fp32(q, k, v)
    assert out.dtype == lse.dtype == torch.float32
    want, want_lse = dense(q, k, v)
    assert error(out, want) < 1e-6
    assert error(lse, want_lse) < 1e-6


@settings(deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape(device: str, data: st.DataObject) -> None:
    backend = "cuda" if device == "cuda" else "cpu"
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 4, 5, 7, 8]))
    shape = Shape(
        data.draw(st.integers(1, 3)),
        kv_heads * group,
        kv_heads,
        data.draw(st.integers(1, 140)),
        data.draw(st.integers(1, 600)),
        8 * data.draw(st.integers(1, 32)),
    )
    causal = data.draw(st.booleans())
    options = {
        "causal": causal,
        "window_left": data.draw(st.sampled_from([-1, 0, 3, 130])),
        "window_right": data.draw(st.sampled_from([-1, 0, 5])),
        "softcap": data.draw(st.sampled_from([0.0, 10.0])),
        "keep": data.draw(st.sampled_from([None, 0.5])),
        "sinks": data.draw(st.booleans()),
    }
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16] if device == "cuda" else list(DTYPES)))
    check(backend, device, shape, dtype, seed=data.draw(st.integers(0, 5)), **options)
