"""What attention is, in fp64, each sequence alone, with explicit masks. It imports nothing of the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

INF = math.inf


def one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One sequence: q ``[Hq, Sq, D]``, k and v ``[Hkv, Skv, D]``, keep ``[Skv]``; differentiable, in ``dtype``.

    With a dtype below fp64 this is the plain PyTorch run that error budgets are measured by.
    """
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    queries, keys = q.shape[1], k.shape[1]
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    score = (q @ k.transpose(1, 2)) * (1 / math.sqrt(q.shape[2]) if scale is None else scale)
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    i = torch.arange(queries, device=q.device)[:, None] + keys - queries
    j = torch.arange(keys, device=q.device)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    if causal:
        seen &= j <= i
    elif window_right >= 0:
        seen &= j <= i + window_right
    if window_left >= 0:
        seen &= j >= i - window_left
    if keep is not None:
        seen = seen & keep
    score = score.masked_fill(~seen, -INF)
    lse = torch.logsumexp(score, -1) if keys else score.sum(-1) - INF
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(dtype)[:, None])
    empty = lse == -INF
    weight = torch.exp(score - torch.where(empty, 0.0, lse)[..., None])
    weight = weight.masked_fill(~seen, 0.0)
    return weight @ v, lse


def dense(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, sinks: Tensor | None = None, **options
):
    """A dense batch ``[B, H, S, D]``, one sequence at a time."""
    rows = [
        one(q[b], k[b], v[b], None if key_padding_mask is None else key_padding_mask[b], sinks, **options)
        for b in range(q.shape[0])
    ]
    return torch.stack([o for o, _ in rows]), torch.stack([s for _, s in rows])
