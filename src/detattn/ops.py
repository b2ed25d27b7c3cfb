"""The ops ``detattn::attention`` and ``detattn::attention_varlen`` and their backwards.

Each is registered in one order: schema and body, fake, autograd. Bodies check, choose a backend, and call it; the eager
shortcut at the end calls the same bodies without the dispatcher layers between.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import checks
from .backends import Backend, Layout, Options, Sequences, Spec, select
from .backends.native import accumulator_dtype

_EXACT = (torch.Tag.needs_exact_strides,)


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    layout: Layout,
    key_padding_mask: bool,
    sinks: bool,
    backward: bool,
    name: str | None,
    *given: Any,
) -> tuple[Backend, Options]:
    """The backend and the resolved options of a call; remembered, since calls repeat them."""
    options = checks.options(head_dim, *given)
    window = options.window_left >= 0 or (options.window_right >= 0 and not options.causal)
    arch = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    softcap = options.softcap != 0.0
    spec = Spec(device.type, arch, dtype, head_dim, layout, key_padding_mask, sinks, window, softcap, backward)
    return select(spec, name), options


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """PyTorch would return a zero tangent in silence for a custom op without a rule."""
    tangents = (forward_ad.unpack_dual(t).tangent for t in tensors if t is not None)  # type: ignore[no-untyped-call]
    if any(t is not None for t in tangents):
        raise NotImplementedError(
            "detattn: forward-mode AD (jvp, dual tensors) is not supported; use reverse mode (backward, grad, vjp)"
        )


def _refuse_forward_transform(*tensors: Tensor | None) -> None:
    """``torch.func.jvp`` hides its tangents from the op's body, so they are looked for before the dispatch."""
    if not torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        _refuse_forward_mode(*tensors)


def _refuse_double_backward(*_: Any) -> NoReturn:
    raise RuntimeError("detattn: double backward is not supported; attention_backward has no gradient of its own")


# detattn::attention


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    checks.dense(q, k, v, key_padding_mask, sinks)
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(q, k, v, sinks)
    chosen, options = _plan(
        q.device,
        q.dtype,
        q.shape[3],
        "dense",
        key_padding_mask is not None,
        sinks is not None,
        False,
        backend,
        causal,
        scale,
        window_left,
        window_right,
        softcap,
    )
    return chosen.forward(q, k, v, key_padding_mask, sinks, None, options)


attention = torch.library.custom_op("detattn::attention", _attention, mutates_args=(), tags=_EXACT)


@attention.register_fake
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    checks.dense(q, k, v, key_padding_mask, sinks)
    checks.options(q.shape[3], causal, scale, window_left, window_right, softcap)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=accumulator_dtype(q.dtype))


def _attention_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.dense(q, k, v, key_padding_mask, sinks)
    checks.gradients(q, dout, dlse, out, lse)
    given = (causal, scale, window_left, window_right, softcap)
    features = (key_padding_mask is not None, sinks is not None, True)
    chosen, options = _plan(q.device, q.dtype, q.shape[3], "dense", *features, backend, *given)
    return chosen.backward(dout, dlse, q, k, v, out, lse, key_padding_mask, sinks, None, options)


attention_backward = torch.library.custom_op(
    "detattn::attention_backward", _attention_backward, mutates_args=(), tags=_EXACT
)


@attention_backward.register_fake
def _attention_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    key_padding_mask: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_gradients(q, k, v, sinks)


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, sinks, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, mask, sinks)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the tensor arguments."""
    if dout is None and dlse is None:
        return (None,) * 5
    q, k, v, out, lse, mask, sinks = ctx.saved_tensors
    call = (
        _attention_backward if _shortcut(q, k, v, dout, dlse, sinks) and not torch.is_grad_enabled() else _op_backward
    )
    dq, dk, dv, dsinks = call(dout, dlse, q, k, v, out, lse, mask, sinks, *ctx.rest)
    needs = ctx.needs_input_grad
    return (
        dq if needs[0] else None,
        dk if needs[1] else None,
        dv if needs[2] else None,
        None,
        dsinks if sinks is not None and needs[4] else None,
    )


def _attention_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_attention_gradients(ctx, *grads), *(None,) * 6)


attention.register_autograd(_attention_autograd, setup_context=_attention_setup)
attention_backward.register_autograd(_refuse_double_backward)


# detattn::attention_varlen


def _attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    seqs = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    layout = checks.varlen(q, k, v, seqs, sinks)
    checks.lengths(q, k, seqs)
    if forward_ad._current_level >= 0:
        _refuse_forward_mode(q, k, v, sinks)
    given = (causal, scale, window_left, window_right, softcap)
    chosen, options = _plan(q.device, q.dtype, q.shape[2], layout, False, sinks is not None, False, backend, *given)
    return chosen.forward(q, k, v, None, sinks, seqs, options)


attention_varlen = torch.library.custom_op("detattn::attention_varlen", _attention_varlen, mutates_args=(), tags=_EXACT)


@attention_varlen.register_fake
def _attention_varlen_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    checks.varlen(q, k, v, Sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table), sinks)
    checks.options(q.shape[2], causal, scale, window_left, window_right, softcap)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=accumulator_dtype(q.dtype))
    return q.new_empty(q.shape), lse


def _attention_varlen_backward(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    scale: float | None,
    window_left: int,
    window_right: int,
    softcap: float,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seqs = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
    layout = checks.varlen(q, k, v, seqs, sinks)
    checks.lengths(q, k, seqs)
    checks.gradients(q, dout, dlse, out, lse)
    given = (causal, scale, window_left, window_right, softcap)
    chosen, options = _plan(q.device, q.dtype, q.shape[2], layout, False, sinks is not None, True, backend, *given)
    return chosen.backward(dout, dlse, q, k, v, out, lse, None, sinks, seqs, options)


attention_varlen_backward = torch.library.custom_op(
    "detattn::attention_varlen_backward", _attention_varlen_backward, mutates_args=(), tags=_EXACT
)


@attention_varlen_backward.register_fake
def _attention_varlen_backward_fake(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    sinks: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fake_gradients(q, k, v, sinks)


def _attention_varlen_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_q, cu_k, used, table, sinks, *rest = inputs
    ctx.save_for_backward(q, k, v, *output, cu_q, cu_k, used, table, sinks)
    ctx.rest = rest
    ctx.set_materialize_grads(False)


def _attention_varlen_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the tensor arguments."""
    if dout is None and dlse is None:
        return (None,) * 8
    q, k, v, out, lse, cu_q, cu_k, used, table, sinks = ctx.saved_tensors
    shortcut = _shortcut(q, k, v, dout, dlse, sinks) and not torch.is_grad_enabled()
    call = _attention_varlen_backward if shortcut else _op_varlen_backward
    dq, dk, dv, dsinks = call(dout, dlse, q, k, v, out, lse, cu_q, cu_k, used, table, sinks, *ctx.rest)
    needs = ctx.needs_input_grad
    return (
        dq if needs[0] else None,
        dk if needs[1] else None,
        dv if needs[2] else None,
        *(None,) * 4,
        dsinks if sinks is not None and needs[7] else None,
    )


def _attention_varlen_autograd(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*_attention_varlen_gradients(ctx, *grads), *(None,) * 6)


attention_varlen.register_autograd(_attention_varlen_autograd, setup_context=_attention_varlen_setup)
attention_varlen_backward.register_autograd(_refuse_double_backward)


def _fake_gradients(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty((0,), dtype=accumulator_dtype(q.dtype)) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


# The eager shortcut

_op = torch.ops.detattn.attention.default
_op_backward = torch.ops.detattn.attention_backward.default
_op_varlen = torch.ops.detattn.attention_varlen.default
_op_varlen_backward = torch.ops.detattn.attention_varlen_backward.default


_PLAIN = (Tensor, torch.nn.Parameter)


def _shortcut(q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> bool:
    """Nothing watches the dispatcher: no compiler, mode, transform, profiler or tensor subclass."""
    if (
        type(q) not in _PLAIN
        or type(k) not in _PLAIN
        or type(v) not in _PLAIN
        or torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or torch._C._functorch.is_functorch_wrapped_tensor(q)
        or q.is_meta
    ):
        return False
    for t in others:  # a loop, not all(): a generator costs 0.4 us  # noqa: SIM110
        if t is not None and type(t) not in _PLAIN:
            return False
    return True


class _Attention(torch.autograd.Function):
    # Not split into forward and setup_context: binding the arguments for the split form costs 50 us a call. The options
    # come as one tuple, since each argument costs.
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, rest: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        out, lse = _attention(q, k, v, mask, sinks, *rest)
        ctx.save_for_backward(q, k, v, out, lse, mask, sinks)
        ctx.rest = rest
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (*_attention_gradients(ctx, *grads), None)


class _AttentionVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        args = (*args[:8], *args[8])
        output = _attention_varlen(*args)
        _attention_varlen_setup(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return (*_attention_varlen_gradients(ctx, *grads), None)


# Function.apply itself, without its Python wrapper (5 us), whose work for functorch has no object here.
_apply = torch._C._FunctionBase.__dict__["apply"].__get__(None, _Attention)
_apply_varlen = torch._C._FunctionBase.__dict__["apply"].__get__(None, _AttentionVarlen)


def _wants_grad(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    )


def call_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    """``detattn::attention`` with all eleven arguments, by the shortest road that keeps its meaning."""
    result: tuple[Tensor, Tensor]
    if not _shortcut(q, k, v, sinks):
        checks.tensors(q=q, k=k, v=v)
        _refuse_forward_transform(q, k, v, sinks)
        result = _op(q, k, v, mask, sinks, *rest)
    elif _wants_grad(q, k, v, sinks):
        result = _apply(q, k, v, mask, sinks, rest)
    else:
        result = _attention(q, k, v, mask, sinks, *rest)
    return result


def call_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    sinks: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """``detattn::attention_varlen`` with all fourteen arguments, by the shortest road that keeps its meaning."""
    tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, sinks)
    result: tuple[Tensor, Tensor]
    checks.tensors(cu_seqlens_q=cu_seqlens_q)
    if not _shortcut(q, k, v, sinks):
        checks.tensors(q=q, k=k, v=v)
        _refuse_forward_transform(q, k, v, sinks)
        result = _op_varlen(*tensors, *rest)
    elif _wants_grad(q, k, v, sinks):
        result = _apply_varlen(*tensors, rest)
    else:
        result = _attention_varlen(*tensors, *rest)
    return result
