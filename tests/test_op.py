"""The ops as PyTorch sees them: opcheck, fake kernels, gradients, what is refused, compile and checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from common import attention, differing, offsets, pack, paged, run, varlen
from conftest import serves
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import detattn
from detattn.harness import Shape, generate

OPS = torch.ops.detattn
DENSE = {
    "three": Shape(3, 4, 2, 127, 127, 16),
    "one query": Shape(3, 8, 1, 1, 130, 16),
    "seven to one": Shape(1, 7, 1, 130, 130, 8),
    "every head its own": Shape(2, 2, 2, 5, 9, 40),
    "eight to two": Shape(1, 8, 2, 33, 40, 8),
}


def native(device: str) -> str:
    return "cuda" if device == "cuda" else "cpu"


def dtype_of(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def tensors(shape: Shape, device: str, grad: bool = True, **kwargs) -> list:
    backward = serves(native(device), device, dtype_of(device), shape.head_dim, backward=True)
    x = generate(shape, dtype_of(device), seed=0, device=device, **kwargs)
    return [t if t is None or t.dtype is torch.bool else t.requires_grad_(grad and backward) for t in x.values()]


@pytest.mark.parametrize("shape", DENSE.values(), ids=DENSE)
def test_opcheck_dense(device: str, shape: Shape) -> None:
    q, k, v, *_ = tensors(shape, device)
    torch.library.opcheck(OPS.attention.default, (q, k, v))
    transposed = q.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(q.requires_grad)
    torch.library.opcheck(OPS.attention.default, (transposed, k, v, None, None, False))


def test_opcheck_dense_with_everything(device: str) -> None:
    args = tensors(Shape(2, 4, 2, 31, 64, 16), device, keep=0.7, sinks=True)
    torch.library.opcheck(OPS.attention.default, (*args, True, 0.3, 20, -1, 15.0))


def test_opcheck_backward(device: str) -> None:
    if not serves(native(device), device, dtype_of(device), 16, backward=True):
        pytest.skip("no backward here")
    q, k, v, mask, sinks = tensors(Shape(2, 4, 2, 31, 64, 16), device, grad=False, keep=0.7, sinks=True)
    for m, s in ((None, None), (mask, sinks)):
        out, lse = OPS.attention(q, k, v, m, s)
        for dout, dlse in ((torch.randn_like(out), None), (None, torch.randn_like(lse)), (out, lse.exp())):
            args = (dout, dlse, q, k, v, out, lse, m, s, True, None, -1, -1, 0.0, None)
            torch.library.opcheck(OPS.attention_backward.default, args)
    cu = offsets([31, 20], device)
    rows = [torch.randn(51, h, 16, dtype=q.dtype, device=device) for h in (4, 2, 2)]
    out, lse = OPS.attention_varlen(*rows, cu, cu)
    args = (torch.randn_like(out), None, *rows, out, lse, cu, cu, None, None, None, True, None, -1, -1, 0.0, None)
    torch.library.opcheck(OPS.attention_varlen_backward.default, args)


def test_opcheck_varlen_and_paged(device: str) -> None:
    q, k, v, *_ = tensors(Shape(1, 4, 2, 130, 130, 16), device)
    rows = [pack(t[0].detach()).contiguous().requires_grad_(q.requires_grad) for t in (q, k, v)]
    cu = offsets([1, 0, 127], device)
    torch.library.opcheck(OPS.attention_varlen.default, (*rows, cu, cu))
    caches = [paged(t[0].detach(), 16, list(range(9))) for t in (k, v)]
    table = torch.arange(9, dtype=torch.int32, device=device)[None]
    used = torch.tensor([130], dtype=torch.int32, device=device)
    args = (rows[0].detach(), *caches, offsets([130], device), None, used, table)
    torch.library.opcheck(OPS.attention_varlen.default, args)


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "permuted": lambda t: t.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
    "sliced": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "expanded": lambda t: t[:1].expand_as(t),
    "every other row": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_fake_strides_are_the_real_ones(device: str, layout) -> None:
    """opcheck of PyTorch 2.11 passes a fake kernel whose strides are wrong; compiled code then asserts."""
    q, k, v, *_ = (layout(t) if t is not None else t for t in tensors(Shape(2, 4, 2, 6, 10, 16), device, grad=False))
    real = OPS.attention(q, k, v)
    with FakeTensorMode() as mode:
        fake = OPS.attention(*(mode.from_tensor(t) for t in (q, k, v)))
    same_meta(real, fake)
    if serves(native(device), device, q.dtype, 16, backward=True):
        args = (layout(real[0]), None, q, k, v, *real, None, None, True, None, -1, -1, 0.0, None)
        gradients = OPS.attention_backward(*args)
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in args]
            same_meta(gradients, OPS.attention_backward(*fakes))
    cu = offsets([2, 4], device)
    rows = [pack(t[0]) for t in (q, k, v)]
    real = OPS.attention_varlen(*rows, cu, cu)
    with FakeTensorMode() as mode:
        fake = OPS.attention_varlen(*(mode.from_tensor(t) for t in (*rows, cu, cu)))
    same_meta(real, fake)


def same_meta(real, fake) -> None:
    for r, f in zip(real, fake, strict=True):
        assert r.shape == f.shape and r.stride() == f.stride() and r.dtype == f.dtype and r.device == f.device


def test_fake_kernels_refuse_what_the_real_ones_refuse() -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="query heads"):
        OPS.attention(torch.empty(1, 3, 4, 8), torch.empty(1, 2, 4, 8), torch.empty(1, 2, 4, 8))


GRADCHECK = {
    "plain": {},
    "window": {"window_left": 3, "causal": False, "window_right": 1},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.9},
}


@pytest.mark.parametrize("options", GRADCHECK.values(), ids=GRADCHECK)
def test_gradcheck(backend: str, device: str, options: dict) -> None:
    if device == "cuda":
        pytest.skip("the GPU kernels have no fp64")
    x = generate(Shape(1, 2, 1, 4, 6, 4), torch.float64, seed=1, sinks=True)
    q, k, v, s = (x[n].double().requires_grad_() for n in ("q", "k", "v", "sinks"))
    call = lambda q, k, v, s: attention(q, k, v, sinks=s, backend=backend, **options)  # noqa: E731
    assert torch.autograd.gradcheck(call, (q, k, v, s))
    rows = [pack(t[0].detach()).contiguous().requires_grad_() for t in (q, k, v)]
    cu_q, cu_k = offsets([1, 3]), offsets([2, 4])
    packed = lambda q, k, v: varlen(q, k, v, cu_q, cu_k, backend=backend, **options)  # noqa: E731
    assert torch.autograd.gradcheck(packed, rows)


def test_partial_gradients(backend: str, device: str) -> None:
    if not serves(backend, device, dtype_of(device), 16, backward=True):
        pytest.skip("no backward here")
    q, k, v, *_ = tensors(Shape(1, 2, 1, 9, 9, 16), device, grad=False)
    every = run(attention, q, k, v, dlse=torch.zeros(1, 2, 9, device=device), dout=torch.ones_like(q), backend=backend)
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2)):
        leaves = [t.detach().clone().requires_grad_(i in wanted) for i, t in enumerate((q, k, v))]
        attention(*leaves, backend=backend)[0].sum().backward()
        for i, (name, leaf) in enumerate(zip(("dq", "dk", "dv"), leaves, strict=True)):
            assert (leaf.grad is not None) == (i in wanted)
            if i in wanted:
                assert differing(leaf.grad, every[name]) == 0


def test_losses_of_out_and_of_lse_alone(backend: str, device: str) -> None:
    if not serves(backend, device, dtype_of(device), 16, backward=True):
        pytest.skip("no backward here")
    q, k, v, *_ = tensors(Shape(1, 2, 1, 9, 9, 16), device)
    out, lse = attention(q, k, v, backend=backend)
    from_out = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    from_lse = torch.autograd.grad(lse.sum(), (q, k, v), retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    assert (from_lse[2] == 0).all() and (from_lse[0] != 0).any()
    for a, b, c in zip(from_out, from_lse, both, strict=True):
        assert torch.allclose((a + b).float(), c.float(), rtol=1e-2 if device == "cuda" else 1e-4, atol=1e-2)
    assert any(differing(a, c) for a, c in zip(from_out, both, strict=True))


def test_double_backward_is_refused(backend: str, device: str) -> None:
    if not serves(backend, device, dtype_of(device), 16, backward=True):
        pytest.skip("no backward here")
    q, k, v, *_ = tensors(Shape(1, 2, 1, 5, 5, 16), device)
    for out in (attention(q, k, v, backend=backend)[0], OPS.attention(q, k, v, backend=backend)[0]):
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward is not supported"):
            dq.sum().backward()
    cu = offsets([2, 3], device)
    rows = [pack(t[0].detach()).requires_grad_() for t in (q, k, v)]
    (dq,) = torch.autograd.grad(varlen(*rows, cu, cu, backend=backend)[0].sum(), rows[0], create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        dq.sum().backward()


def test_forward_mode_is_refused(device: str) -> None:
    q, k, v, *_ = tensors(Shape(1, 2, 1, 5, 5, 16), device, grad=False)
    cu = offsets([2, 3], device)
    rows = [pack(t[0]) for t in (q, k, v)]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        dual_rows = forward_ad.make_dual(rows[0], torch.ones_like(rows[0]))
        calls = (
            lambda: detattn.attention(dual, k, v),
            lambda: OPS.attention(dual, k, v),
            lambda: varlen(dual_rows, *rows[1:], cu, cu),
            lambda: OPS.attention_varlen(dual_rows, *rows[1:], cu, cu),
        )
        for call in calls:
            with pytest.raises(NotImplementedError, match="forward-mode AD"):
                call()
        detattn.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(lambda t: detattn.attention(t, k, v), (q,), (torch.ones_like(q),))


def test_results_do_not_alias(device: str) -> None:
    q, k, v, *_ = tensors(Shape(1, 1, 1, 1, 1, 16), device, grad=False)
    out, lse = attention(q, k, v)
    pointers = {t.untyped_storage().data_ptr() for t in (q, k, v, out, lse)}
    assert len(pointers) == 5


def test_in_place_edit_of_a_saved_tensor_raises(device: str) -> None:
    q, k, v, *_ = tensors(Shape(1, 2, 1, 5, 5, 16), device)
    if not q.requires_grad:
        pytest.skip("no backward here")
    k2 = k * 1
    out = detattn.attention(q, k2, v)
    k2.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_inference_mode_and_no_grad(device: str) -> None:
    q, k, v, *_ = tensors(Shape(1, 2, 1, 5, 5, 16), device)
    want = detattn.attention(q, k, v)
    with torch.inference_mode():
        got = detattn.attention(q, k, v)
    assert got.is_inference() and differing(want, got) == 0
    with torch.no_grad():
        assert not detattn.attention(q, k, v).requires_grad


def test_the_eager_shortcut_and_the_op_agree(device: str) -> None:
    q, k, v, mask, sinks = tensors(Shape(2, 4, 2, 20, 30, 16), device, keep=0.5, sinks=True)
    short = detattn.attention(q, k, v, key_padding_mask=mask, sinks=sinks, return_lse=True)
    op = OPS.attention(q, k, v, mask, sinks)
    assert all(differing(a, b) == 0 for a, b in zip(short, op, strict=True))
    if q.requires_grad:
        grads = [torch.autograd.grad(o[0].sum() + o[1].sum(), (q, k, v, sinks)) for o in (short, op)]
        assert all(differing(a, b) == 0 for a, b in zip(*grads, strict=True))


def test_modes_and_profilers_see_the_op(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q, k, v, *_ = tensors(Shape(1, 2, 1, 5, 5, 16), device)
    with Watch():
        out = detattn.attention(q, k, v)
        if q.requires_grad:
            out.sum().backward()
    assert "detattn.attention.default" in seen
    assert not q.requires_grad or "detattn.attention_backward.default" in seen
    with torch.profiler.profile() as profile:
        detattn.attention(q, k, v)
    assert "detattn::attention" in {e.name for e in profile.events()}


def test_checkpoint(device: str) -> None:
    q, k, v, *_ = tensors(Shape(1, 2, 1, 20, 20, 16), device)
    if not q.requires_grad:
        pytest.skip("no backward here")
    want = torch.autograd.grad(detattn.attention(q, k, v).sum(), (q, k, v))
    for reentrant in (False, True):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        checkpoint(detattn.attention, *leaves, use_reentrant=reentrant).sum().backward()
        assert all(differing(a, b.grad) == 0 for a, b in zip(want, leaves, strict=True))


def test_autocast(device: str) -> None:
    """The inputs take autocast's dtype, mixed ones too; fp64 stays."""
    q, k, v, *_ = tensors(Shape(1, 2, 1, 8, 8, 16), device, grad=False)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = detattn.attention(q.float(), k.float(), v.bfloat16())
        if device == "cpu":
            assert detattn.attention(q.double(), k.double(), v.double()).dtype is torch.float64
    assert differing(got, detattn.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())) == 0


@pytest.mark.parametrize("warn_only", [False, True])
def test_deterministic_mode(device: str, warn_only: bool, recwarn: pytest.WarningsRecorder) -> None:
    q, k, v, *_ = tensors(Shape(1, 2, 1, 8, 8, 16), device)
    want = detattn.attention(q, k, v)
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        got = detattn.attention(q, k, v)
        if q.requires_grad:
            got.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert differing(want, got) == 0 and not [w for w in recwarn if "determinis" in str(w.message)]


def test_compiled_graph_holds_one_node_a_pass(device: str) -> None:
    from torch._dynamo.backends.common import aot_autograd

    q, k, v, *_ = tensors(Shape(1, 2, 1, 20, 20, 16), device)
    graphs: list[str] = []

    def capture(gm, _):
        graphs.append(gm.code)
        return gm.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=capture, bw_compiler=capture)
    out = torch.compile(detattn.attention, backend=backend, fullgraph=True)(q, k, v)
    assert graphs[0].count("detattn.attention.default") == 1
    if q.requires_grad:
        out.sum().backward()
        assert graphs[1].count("detattn.attention_backward.default") == 1
        assert graphs[1].count("detattn.attention.default") == 0


def test_memory_is_linear_in_length() -> None:
    """Backward scratch at four times the length is at most four times as large, give or take what is constant."""
    peak = {}
    for length in (1024, 4096):
        q = torch.randn(1, 2, length, 16, requires_grad=True)
        k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(2))
        with torch.profiler.profile(profile_memory=True) as profile:
            detattn.attention(q, k, v).sum().backward()
        sizes = [e.self_cpu_memory_usage for e in profile.events() if e.self_cpu_memory_usage > 0]
        peak[length] = max(sizes)
    assert peak[4096] <= 5 * peak[1024]
    assert peak[4096] < 4096 * 4096
