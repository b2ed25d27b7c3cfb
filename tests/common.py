"""What the tests share: comparing bytes, running a call with its gradients, cutting and packing batches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import detattn

VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Named = dict[str, Tensor]


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor as integers."""
    return t.detach().contiguous().view(VIEW[t.element_size()])


def differing(a: Tensor, b: Tensor) -> int:
    """Elements whose bytes differ."""
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype
    return int((raw(a) != raw(b)).sum())


def assert_same_bits(a: Named, b: Named, budget: int = 0) -> None:
    assert a.keys() == b.keys()
    bad = {name: differing(a[name], b[name]) for name in a}
    assert all(n <= budget for n in bad.values()), f"elements whose bits differ: {bad}"


def error(got: Tensor, want: Tensor) -> float:
    """Relative error in the 2-norm; rows that are infinite on both sides agree."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    same = (got == want) & torch.isinf(want)
    got, want = got.masked_fill(same, 0.0), want.masked_fill(same, 0.0)
    norm = want.norm()
    return float((got - want).norm() / norm) if norm > 0 else float((got - want).abs().max() if got.numel() else 0.0)


def upstream(like: Tensor, seed: int) -> Tensor:
    g = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, generator=g, dtype=torch.float64, device=like.device).to(like.dtype)


def run(
    call: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    grad: bool = True,
    **options: object,
) -> Named:
    """out and lse of a call, and where wanted dq, dk, dv (and dsinks) for the given upstream gradients."""
    named = {"q": q, "k": k, "v": v} | ({} if sinks is None else {"sinks": sinks})
    leaves = {n: t.detach().requires_grad_(grad) for n, t in named.items()}
    out, lse = (
        call(*leaves.values(), **options)
        if sinks is None
        else call(leaves["q"], leaves["k"], leaves["v"], sinks=leaves["sinks"], **options)
    )
    result = {"out": out.detach(), "lse": lse.detach()}
    if grad:
        grads = [upstream(out, 1) if dout is None else dout, upstream(lse, 2) if dlse is None else dlse]
        finite = torch.isfinite(lse)
        grads[1] = torch.where(finite, grads[1], 0.0)
        result |= {
            f"d{n}": g
            for n, g in zip(leaves, torch.autograd.grad([out, lse], list(leaves.values()), grads), strict=True)
        }
    return result


def attention(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return detattn.attention(q, k, v, return_lse=True, **options)  # type: ignore[return-value, arg-type]


def varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor | None = None, **options: object):
    return detattn.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **options)  # type: ignore[arg-type]


def offsets(lengths: list[int], device: str = "cpu") -> Tensor:
    """cu_seqlens of these lengths."""
    total = [0]
    for n in lengths:
        total.append(total[-1] + n)
    return torch.tensor(total, dtype=torch.int32, device=device)


def pack(t: Tensor) -> Tensor:
    """``[H, S, D]`` as rows of a packed tensor ``[S, H, D]``."""
    return t.transpose(0, 1)


def paged(t: Tensor, page_size: int, order: list[int], poison: float = float("nan")) -> Tensor:
    """``t [H, S, D]`` as a cache ``[pages, page_size, H, D]``; its page i lies at ``order[i]``, the rest is poison."""
    rows = pack(t)
    cache = torch.full((max(order) + 2, page_size, *rows.shape[1:]), poison, dtype=t.dtype, device=t.device)
    for i, page in enumerate(order):
        part = rows[i * page_size : (i + 1) * page_size]
        cache[page, : part.shape[0]] = part
    return cache
