"""The public functions. Defaults and the autocast rule live here; what a call may hold is checked in ``checks.py``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks, ops
from .backends import Sequences

__all__ = ["attention", "attention_varlen"]


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under ``torch.autocast`` the inputs take its dtype, as PyTorch's own attention does; fp64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t.to(dtype) if t.dtype is not torch.float64 else t for t in tensors)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention whose bits for a row depend on that row's query and its visible keys alone.

    The layout is PyTorch's, ``[B, H, S, D]``, not FlashAttention's ``[B, S, H, D]``: those tensors pass as
    ``x.transpose(1, 2)``. Where S and H happen to fit both readings, nothing can tell them apart.

    Args:
        q: ``[B, Hq, Sq, D]``, fp32, fp64, bf16 or fp16; D up to 256.
        k, v: ``[B, Hkv, Skv, D]``; ``Hq`` is a multiple of ``Hkv``. Any strides are right; where the last one is not 1
            a copy is made.
        key_padding_mask: bool ``[B, Skv]``, True = keep. What masked keys and values hold (NaN too) has no effect; on
            GPUs values masked *between* valid keys must be finite.
        sinks: ``[Hq]``, a logit per query head that joins the softmax denominator.
        causal: key j is visible to query i only where ``j <= Skv - Sq + i`` (bottom-right aligned).
        scale: multiplies q.k; ``1/sqrt(D)`` where None.
        window_left, window_right: keys visible before and after the aligned one; -1 = all. Causal means right = 0.
        softcap: c > 0 replaces a scaled score s by ``c * tanh(s / c)``.
        return_lse: also return lse.
        backend: a backend's name; None chooses by capability (see ``detattn.explain``).

    Returns:
        ``out`` like q (contiguous), and where asked ``lse [B, Hq, Sq]``, the natural log of each row's softmax
        denominator, in fp32 (fp64 for fp64 inputs). A row that sees no key has out 0 and lse -inf (its sink, if any).
        Both are differentiable once. Guarantees: ``detattn.contract.PROMISES``.

    Raises:
        TypeError, ValueError: what came, what is supported, what to do.
        UnsupportedError: no backend serves the call; each one's reason.

    Example:
        >>> import torch, detattn
        >>> q, k, v = (torch.randn(2, h, 300, 64) for h in (8, 2, 2))
        >>> out = detattn.attention(q, k, v)
        >>> torch.equal(out[:, :, -1:], detattn.attention(q[:, :, -1:], k, v))
        True
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    out, lse = ops.call_attention(
        q, k, v, key_padding_mask, sinks, causal, scale, window_left, window_right, softcap, backend
    )
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    return_lse: bool = False,
    check_indices: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over packed sequences, or against a paged cache, with the bits of each sequence alone.

    Args:
        q: ``[Tq, Hq, D]``, the queries of all sequences one after the other.
        k, v: ``[Tk, Hkv, D]`` packed, or with ``block_table`` the cache ``[num_pages, page_size, Hkv, D]``.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``, the offsets of the sequences; rows past the last one get out 0
            and lse -inf. ``cu_seqlens_k`` is None for a paged cache.
        block_table: int32 ``[B, pages]``, the pages of each sequence in order. Entries past its length are not read.
        seqused_k: int32 ``[B]``, the keys of each sequence in use (required with ``block_table``); the causal
            alignment counts these.
        max_seqlen_q, max_seqlen_k: bounds on the lengths, accepted for compatibility. They never matter; one below
            the longest sequence raises on the CPU, where looking costs nothing.
        sinks, causal, scale, window_left, window_right, softcap, return_lse, backend: as in ``attention``.
        check_indices: on a GPU, look at what the index tensors hold before anything is launched and raise as on the
            CPU; that waits for the GPU, so it is for finding a fault, not for serving. Without it the GPU reads a page
            that does not exist as zeros, never as another page. Compiled code ignores it.

    Returns:
        ``out [Tq, Hq, D]``, and where asked ``lse [Hq, Tq]``. Differentiable once, except through a paged cache: its
        backward raises ``UnsupportedError``.

    Raises:
        TypeError, ValueError: what came, what is supported, what to do. On the CPU, and with ``check_indices``, the
            index tensors' contents are checked too.
        UnsupportedError: no backend serves the call; each one's reason.

    Example:
        >>> import torch, detattn
        >>> q, k, v = (torch.randn(300, h, 64) for h in (8, 2, 2))
        >>> cu = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> packed = detattn.attention_varlen(q, k, v, cu, cu)
        >>> alone = detattn.attention(*(t[100:].transpose(0, 1)[None] for t in (q, k, v)))
        >>> torch.equal(packed[100:], alone[0].transpose(0, 1))
        True
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = _autocast(q, k, v)
    if max_seqlen_q is not None or max_seqlen_k is not None or check_indices:
        seqs = Sequences(cu_seqlens_q, cu_seqlens_k, seqused_k, block_table)
        checks.varlen(q, k, v, seqs, sinks)
        if not torch.compiler.is_compiling():
            if check_indices:
                checks.lengths(q, k, seqs, anywhere=True)
            checks.bounds(q, k, seqs, max_seqlen_q, max_seqlen_k, anywhere=check_indices)
    out, lse = ops.call_attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        block_table,
        sinks,
        causal,
        scale,
        window_left,
        window_right,
        softcap,
        backend,
    )
    return (out, lse) if return_lse else out
