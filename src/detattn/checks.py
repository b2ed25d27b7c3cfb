"""What a call must look like. Every user-facing error about arguments is raised here, before anything is launched."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from . import contract
from .backends.base import Layout, Options, Sequences

_ENDLESS = 1 << 40
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _fail(came: str, supported: str, advice: str) -> str:
    return f"detattn: {came}; supported: {supported}. {advice}"


def _shapes(**tensors: Tensor) -> str:
    return ", ".join(f"{n} {tuple(t.shape)}" for n, t in tensors.items())


def _same_kind(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(
            _fail(
                f"q, k and v came as {q.dtype}, {k.dtype} and {v.dtype}",
                "one dtype for all three",
                "Cast them to one dtype, or call detattn.attention under torch.autocast, which does.",
            )
        )
    if q.dtype not in DTYPES:
        raise TypeError(_fail(f"q came as {q.dtype}", ", ".join(str(d) for d in DTYPES), "Cast the inputs."))
    if not (q.device == k.device == v.device):
        raise ValueError(
            _fail(f"q, k and v are on {q.device}, {k.device} and {v.device}", "one device", "Move them together.")
        )


def options(
    head_dim: int, causal: bool, scale: float | None, window_left: int, window_right: int, softcap: float
) -> Options:
    """The options with defaults resolved.

    Raises:
        TypeError, ValueError: a value of the wrong kind or out of range.
    """
    for name, value in (("scale", scale), ("softcap", softcap)):
        if isinstance(value, Tensor):
            raise TypeError(_fail(f"{name} came as a tensor", "a Python float", f"Pass float({name})."))
        if value is not None and not isinstance(value, (int, float, torch.SymFloat, torch.SymInt)):
            raise TypeError(_fail(f"{name} came as {value!r}", "a number", "Pass a Python float."))
    if scale is None:
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    elif not (0.0 < scale < math.inf):
        raise ValueError(_fail(f"scale is {scale}", "a finite number above 0", "Fold a sign or a zero into q."))
    if not (0.0 <= softcap < math.inf):
        raise ValueError(_fail(f"softcap is {softcap}", "0 (none) or a finite number above 0", "Pass 0.0 for none."))
    for name, window in (("window_left", window_left), ("window_right", window_right)):
        if not isinstance(window, (int, torch.SymInt)):
            raise TypeError(_fail(f"{name} came as {window!r}", "an int, a count of keys", f"Pass int({name})."))
        if window < -1:
            raise ValueError(_fail(f"{name} is {window}", "-1 (unbounded) or a count of keys", "Pass -1 for none."))
    # A window past every sequence is none, and arithmetic on it must not overflow.
    window_left, window_right = (-1 if w >= _ENDLESS else w for w in (window_left, window_right))
    return Options(causal, scale, window_left, window_right, softcap)


def _heads(q: Tensor, k: Tensor, hq: int, hkv: int, head_dim: int) -> None:
    if head_dim < 1 or head_dim > contract.MAX_HEAD_DIM:
        raise ValueError(
            _fail(
                f"the head dim is {head_dim} ({_shapes(q=q, k=k)})",
                f"1..{contract.MAX_HEAD_DIM}",
                "The head dim is the last dimension.",
            )
        )
    if hkv == 0 and hq == 0:
        return
    if hkv == 0 or hq % hkv:
        raise ValueError(
            _fail(
                f"{hq} query heads and {hkv} key heads ({_shapes(q=q, k=k)})",
                "a multiple: every key head serves the same number of query heads",
                "Tensors laid out [B, S, H, D] must be transposed: x.transpose(1, 2), no copy needed.",
            )
        )


def tensors(**given: object) -> None:
    """Checks that what must be a tensor is one. Raises TypeError."""
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                _fail(f"{name} came as {type(value).__name__}", "a torch.Tensor", f"Pass torch.tensor({name}).")
            )


def dense(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None, sinks: Tensor | None) -> None:
    """Checks the tensors of a dense call. Raises TypeError or ValueError."""
    qs, ks = q.shape, k.shape
    if (
        key_padding_mask is None
        and sinks is None
        and len(qs) == len(ks) == 4
        and ks == v.shape
        and qs[0] == ks[0]
        and qs[3] == ks[3]
        and 1 <= qs[3] <= contract.MAX_HEAD_DIM
        and ks[1]
        and qs[1] % ks[1] == 0
        and q.dtype is k.dtype is v.dtype
        and q.dtype in DTYPES
        and q.device == k.device == v.device
    ):
        return  # the common call, at a tenth of the price of finding out what is wrong with another
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            _fail(
                _shapes(q=q, k=k, v=v),
                "q [B, Hq, Sq, D], k and v [B, Hkv, Skv, D]",
                "Packed tensors go to detattn.attention_varlen.",
            )
        )
    _same_kind(q, k, v)
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            _fail(
                _shapes(q=q, k=k, v=v),
                "one batch size, one head dim, k and v of one shape",
                "The layout is [batch, heads, sequence, head dim].",
            )
        )
    _heads(q, k, q.shape[1], k.shape[1], q.shape[3])
    if key_padding_mask is not None:
        m = key_padding_mask
        if m.dtype is not torch.bool or m.dim() != 2 or m.shape[0] != k.shape[0] or m.shape[1] != k.shape[2]:
            raise ValueError(
                _fail(
                    f"key_padding_mask {tuple(m.shape)} of {m.dtype}",
                    f"bool [B, Skv] = {(k.shape[0], k.shape[2])}, True = keep",
                    "A 0/1 integer mask becomes one by mask.bool(); additive masks are not supported.",
                )
            )
        _on_device("key_padding_mask", m, q)
    _sinks(sinks, q, q.shape[1])


def _on_device(name: str, t: Tensor, q: Tensor) -> None:
    if t.device != q.device:
        raise ValueError(_fail(f"{name} is on {t.device}, q on {q.device}", "one device", f"Move {name}."))


def _sinks(sinks: Tensor | None, q: Tensor, heads: int) -> None:
    if sinks is None:
        return
    if sinks.dim() != 1 or sinks.shape[0] != heads or not sinks.dtype.is_floating_point:
        raise ValueError(
            _fail(
                f"sinks {tuple(sinks.shape)} of {sinks.dtype}",
                f"a floating-point logit per query head, [{heads}]",
                "One number a head joins the softmax denominator.",
            )
        )
    _on_device("sinks", sinks, q)


def _index(name: str, t: Tensor, rank: int, q: Tensor) -> None:
    if t.dtype is not torch.int32 or t.dim() != rank:
        raise TypeError(
            _fail(
                f"{name} {tuple(t.shape)} of {t.dtype}", f"an int32 tensor of {rank} dimension(s)", f"Try {name}.int()."
            )
        )
    _on_device(name, t, q)


def varlen(q: Tensor, k: Tensor, v: Tensor, seqs: Sequences, sinks: Tensor | None) -> Layout:
    """Checks the tensors of a varlen call and names its layout. Raises TypeError or ValueError."""
    cu_q, cu_k, used, table = seqs
    paged = table is not None
    kv_rank = 4 if paged else 3
    if q.dim() != 3 or k.dim() != kv_rank or v.dim() != kv_rank:
        raise ValueError(
            _fail(
                _shapes(q=q, k=k, v=v) + (" with" if paged else " without") + " block_table",
                "q [Tq, Hq, D] and k, v [Tk, Hkv, D], or [num_pages, page_size, Hkv, D] with block_table",
                "Batched tensors go to detattn.attention.",
            )
        )
    _same_kind(q, k, v)
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(_fail(_shapes(q=q, k=k, v=v), "one head dim, k and v of one shape", "Check the layout."))
    _heads(q, k, q.shape[1], k.shape[-2], q.shape[2])
    _index("cu_seqlens_q", cu_q, 1, q)
    if cu_q.shape[0] < 1:
        raise ValueError(_fail("cu_seqlens_q is empty", "batch + 1 offsets, the first 0", "Pass [0] for no sequences."))
    batch = cu_q.shape[0] - 1
    if paged == (cu_k is not None):
        raise ValueError(
            _fail(
                "cu_seqlens_k and block_table both came" if paged else "neither cu_seqlens_k nor block_table came",
                "cu_seqlens_k for packed k and v; block_table and seqused_k for a paged cache",
                "Pass the one that describes k and v.",
            )
        )
    if cu_k is not None:
        _index("cu_seqlens_k", cu_k, 1, q)
        if cu_k.shape[0] != batch + 1:
            raise ValueError(
                _fail(
                    f"cu_seqlens_k holds {cu_k.shape[0]} offsets",
                    f"batch + 1 = {batch + 1}, as cu_seqlens_q",
                    "Both describe the same sequences.",
                )
            )
    if used is not None:
        _index("seqused_k", used, 1, q)
        if used.shape[0] != batch:
            raise ValueError(
                _fail(
                    f"seqused_k holds {used.shape[0]} lengths",
                    f"one a sequence, {batch}",
                    "cu_seqlens_q sets the batch.",
                )
            )
    if table is not None:
        _index("block_table", table, 2, q)
        if used is None:
            raise ValueError(_fail("block_table came without seqused_k", "both", "seqused_k [B] holds the lengths."))
        if table.shape[0] != batch:
            raise ValueError(
                _fail(
                    f"block_table has {table.shape[0]} rows", f"one a sequence, {batch}", "cu_seqlens_q sets the batch."
                )
            )
        if k.shape[1] < 1:
            raise ValueError(_fail("the page size is 0", "1 or more", "k is [num_pages, page_size, Hkv, D]."))
    _sinks(sinks, q, q.shape[1])
    return "paged" if paged else "varlen"


def lengths(q: Tensor, k: Tensor, seqs: Sequences, anywhere: bool = False) -> None:
    """Checks what the index tensors of a CPU call hold, and ``anywhere`` else at the price of a synchronisation.

    Raises:
        ValueError: offsets that decrease or leave the tensor, lengths above their room, pages that do not exist.
    """
    if q.device.type != "cpu" and not anywhere:
        return
    cu_q = seqs.cu_seqlens_q.tolist()
    _offsets("cu_seqlens_q", cu_q, q.shape[0])
    if seqs.cu_seqlens_k is not None:
        cu_k = seqs.cu_seqlens_k.tolist()
        _offsets("cu_seqlens_k", cu_k, k.shape[0])
        room = [b - a for a, b in pairwise(cu_k)]
    else:
        assert seqs.block_table is not None
        room = [seqs.block_table.shape[1] * k.shape[1]] * (len(cu_q) - 1)
    used = room if seqs.seqused_k is None else seqs.seqused_k.tolist()
    for b, (n, r) in enumerate(zip(used, room, strict=True)):
        if not 0 <= n <= r:
            raise ValueError(_fail(f"seqused_k[{b}] is {n}", f"0..{r}, the room of sequence {b}", "Check the lengths."))
    if seqs.block_table is not None:
        page_size, num_pages = k.shape[1], k.shape[0]
        for b, (n, row) in enumerate(zip(used, seqs.block_table.tolist(), strict=True)):
            for i, page in enumerate(row[: -(-n // page_size)]):
                if not 0 <= page < num_pages:
                    raise ValueError(
                        _fail(
                            f"block_table[{b}, {i}] is {page}",
                            f"a page in 0..{num_pages - 1}",
                            f"The entry is used: sequence {b} has {n} keys in pages of {page_size}.",
                        )
                    )


def bounds(
    q: Tensor, k: Tensor, seqs: Sequences, max_seqlen_q: object, max_seqlen_k: object, anywhere: bool = False
) -> None:
    """Checks ``max_seqlen_*`` against the lengths, where ``lengths`` looks too; nothing else ever reads them.

    Raises:
        ValueError: a bound below the longest sequence.
    """
    if (q.device.type != "cpu" and not anywhere) or (max_seqlen_q is None and max_seqlen_k is None):
        return
    longest_q = int(seqs.cu_seqlens_q.diff().max()) if seqs.cu_seqlens_q.shape[0] > 1 else 0
    if seqs.seqused_k is not None:
        longest_k = int(seqs.seqused_k.max()) if seqs.seqused_k.shape[0] else 0
    else:
        assert seqs.cu_seqlens_k is not None
        longest_k = int(seqs.cu_seqlens_k.diff().max()) if seqs.cu_seqlens_k.shape[0] > 1 else 0
    for name, bound, longest in (("max_seqlen_q", max_seqlen_q, longest_q), ("max_seqlen_k", max_seqlen_k, longest_k)):
        if bound is not None and int(bound) < longest:  # type: ignore[call-overload]
            raise ValueError(
                _fail(f"{name} is {bound}", f"{longest} or more, the longest sequence", "None is always right.")
            )


def gradients(q: Tensor, dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """Checks what a backward op is handed besides the inputs. Raises ValueError or TypeError."""
    for name, t, like in (("out", out, q), ("dout", dout, q), ("dlse", dlse, lse)):
        if t is None:
            continue
        if t.shape != like.shape:
            raise ValueError(
                _fail(f"{name} is {tuple(t.shape)}", f"{tuple(like.shape)}", "Pass what the forward op returned.")
            )
        if t.dtype is not like.dtype:
            raise TypeError(_fail(f"{name} is {t.dtype}", f"{like.dtype}", "Gradients have the dtype of their value."))


def _offsets(name: str, offsets: list[int], rows: int) -> None:
    if offsets[0] < 0 or offsets[-1] > rows:
        raise ValueError(
            _fail(f"{name} runs from {offsets[0]} to {offsets[-1]}", f"offsets in 0..{rows}", "Offsets count rows.")
        )
    for i, (a, b) in enumerate(pairwise(offsets)):
        if b < a:
            raise ValueError(
                _fail(
                    f"{name} falls from {a} to {b} at sequence {i}",
                    "offsets that do not decrease",
                    "Use a running sum of lengths.",
                )
            )
