"""The controls: an attention that keeps every promise, and its faulty twins, each of which breaks one.

Inside a block of keys the arithmetic is exact: operands lie on a fixed grid and sums are taken in fp64, where no order
of addition rounds. Between blocks the partial sums are rounded to fp32, as real kernels hold them: a fault is no louder
than a real one, and in bf16 or fp16 few elements of ``out`` show it. So the bits depend on where the blocks are cut,
and on nothing else. ``FAULTS`` holds, a promise a line, how a fault lets the cut depend on what must not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .targets import Target

BLOCK = 128


class Cut(NamedTuple):
    """Blocks of ``size`` keys, the first one shorter by ``lead``."""

    size: int = BLOCK
    lead: int = 0


@dataclass(frozen=True)
class Surroundings:
    """What a call looks like around one of its sequences. None of it may matter."""

    call: int  # calls made before this one
    batch: int
    position: int  # of the sequence in the batch
    queries: int
    keys: int  # valid keys of the sequence
    longest: int  # valid keys of the longest sequence
    bound: int  # max_seqlen_k, longest where not told
    room: int  # keys in the sequence's buffer, padding included
    start: int  # the sequence's first key, in its buffer or in the packed tensor
    heads: int
    kv_heads: int
    page_size: int  # 0 where the cache is contiguous
    packed: bool
    strided: bool  # q, k or v is not contiguous
    masked: bool  # a window or a key_padding_mask was given
    wants_lse: bool
    elsewhere: bool  # other threads or another stream than the first call had
    loud: bool  # a key in the batch is larger than 16, or not finite


@dataclass(frozen=True)
class Fault:
    """How the cut depends on the surroundings, and the same in words."""

    text: str
    cut: Callable[[Surroundings], Cut]


_HALF = Cut(BLOCK // 2)
_WHOLE = Cut()

FAULTS: dict[str, Fault] = {
    "rerun": Fault("every third call cuts other blocks", lambda s: _HALF if s.call % 3 == 2 else _WHOLE),
    "batch-size": Fault("more than two sequences: smaller blocks", lambda s: _HALF if s.batch > 2 else _WHOLE),
    "batch-position": Fault("sequences after the first have other blocks", lambda s: _HALF if s.position else _WHOLE),
    "neighbours": Fault(
        "a long or a loud neighbour changes the blocks",
        lambda s: _HALF if s.longest > s.keys or s.loud else _WHOLE,
    ),
    "chunked-prefill": Fault("few queries: smaller blocks", lambda s: _HALF if s.queries < 768 else _WHOLE),
    "decode": Fault(
        "up to 16 queries: the keys in four splits, whatever their number",
        lambda s: Cut(max(1, -(-s.keys // 4))) if s.queries <= 16 else _WHOLE,
    ),
    "right-padding": Fault(
        "room for more keys than there are changes the blocks",
        lambda s: _HALF if s.room > s.start + s.keys else _WHOLE,
    ),
    "left-padding": Fault("blocks anchored at the buffer's start", lambda s: Cut(BLOCK, s.start % BLOCK)),
    "packed": Fault("blocks anchored at the packed tensor's start", lambda s: Cut(BLOCK, s.start % BLOCK)),
    "paged": Fault("a block is a page", lambda s: Cut(s.page_size or BLOCK)),
    "layout": Fault("strided inputs take another path", lambda s: _HALF if s.strided else _WHOLE),
    "heads": Fault("the number of key heads changes the blocks", lambda s: Cut(48 * min(s.kv_heads, 3))),
    "bounds": Fault("a generous max_seqlen changes the blocks", lambda s: _HALF if s.bound > s.longest else _WHOLE),
    "mask-neutral": Fault("any mask takes another path", lambda s: _HALF if s.masked else _WHOLE),
    "execution": Fault(
        "another number of threads, or another stream: other blocks", lambda s: _HALF if s.elsewhere else _WHOLE
    ),
    "lse-request": Fault("asking for lse takes another path", lambda s: _HALF if s.wants_lse else _WHOLE),
}


def control(promise: str | None, like: Target | None = None, with_lse: bool = False) -> Target:
    """The attention that breaks ``promise`` and keeps the others; with None the one that keeps all.

    Args:
        promise: an id of ``FAULTS``.
        like: the control lacks what this target lacks, so that a check puts both through the same cases.
        with_lse: it returns lse without being asked where it lacks ``return_lse``.
    """
    fault = (lambda s: _WHOLE) if promise is None else FAULTS[promise].cut
    faulty = _Faulty(fault, with_lse and like is not None and not like.offers("lse"))
    lacks = {} if like is None else dict(like.lacks)
    lacks["compile"] = lacks["graph"] = "a control is a Python loop with looks at its inputs"
    pages = (7, 16, 64, 256) if like is None else like.page_sizes
    name = "the faultless twin" if promise is None else f"control of {promise}"
    return Target(name, faulty.dense, faulty.packed, lacks, pages)


class _Faulty:
    """Dense and packed attention, one sequence after the other, blocks cut as ``fault`` says."""

    def __init__(self, fault: Callable[[Surroundings], Cut], always_lse: bool) -> None:
        self.fault = fault
        self.always_lse = always_lse
        self.calls = count()
        self.home: Any = None

    def _elsewhere(self, device: torch.device) -> bool:
        here = torch.cuda.current_stream(device) if device.type == "cuda" else torch.get_num_threads()
        if self.home is None:
            self.home = here
        return bool(here != self.home)

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        key_padding_mask: Tensor | None = None,
        window_left: int = -1,
        window_right: int = -1,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        spans = [(0, k.shape[2])] * q.shape[0]
        if key_padding_mask is not None:
            spans = [(int(m.int().argmax()), int(m.sum())) for m in key_padding_mask]
        call, elsewhere = next(self.calls), self._elsewhere(q.device)
        results = []
        for b, (qb, kb, vb) in enumerate(zip(q.unbind(), k.unbind(), v.unbind(), strict=True)):
            around = Surroundings(
                call=call,
                batch=len(spans),
                position=b,
                queries=q.shape[2],
                keys=spans[b][1],
                longest=max(n for _, n in spans),
                bound=max(n for _, n in spans),
                room=k.shape[2],
                start=spans[b][0],
                heads=q.shape[1],
                kv_heads=k.shape[1],
                page_size=0,
                packed=False,
                strided=not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()),
                masked=key_padding_mask is not None or window_left >= 0 or window_right >= 0,
                wants_lse=return_lse,
                elsewhere=elsewhere,
                loud=_loud(k),
            )
            windows = (window_left, 0 if causal else window_right)
            call_ = _Call(spans[b], windows, scale or q.shape[-1] ** -0.5, self.fault(around))
            results.append(_apply(qb, kb, vb, sinks, call_))
        out, lse = (torch.stack(part) for part in zip(*results, strict=True))
        return (out, lse) if return_lse or self.always_lse else out

    def packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor | None = None,
        *,
        block_table: Tensor | None = None,
        seqused_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        causal: bool = True,
        scale: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        queries = cu_seqlens_q.diff().tolist()
        if cu_seqlens_k is not None:
            keys = cu_seqlens_k.diff().tolist()
            ks, vs = torch.split(k, keys), torch.split(v, keys)
        else:
            assert block_table is not None
            assert seqused_k is not None
            keys = seqused_k.tolist()
            tables = [row[: -(-n // k.shape[1])].long() for row, n in zip(block_table, keys, strict=True)]
            ks, vs = (tuple(c[t].flatten(0, 1)[:n] for t, n in zip(tables, keys, strict=True)) for c in (k, v))
        starts = [0, *torch.tensor(keys).cumsum(0).tolist()]
        call, elsewhere = next(self.calls), self._elsewhere(q.device)
        results = []
        for b, qb in enumerate(torch.split(q, queries)):
            around = Surroundings(
                call=call,
                batch=len(keys),
                position=b,
                queries=queries[b],
                keys=keys[b],
                longest=max(keys),
                bound=max_seqlen_k or max(keys),
                room=keys[b],
                start=starts[b],
                heads=q.shape[1],
                kv_heads=k.shape[-2],
                page_size=k.shape[1] if block_table is not None else 0,
                packed=True,
                strided=not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()),
                masked=False,
                wants_lse=return_lse,
                elsewhere=elsewhere,
                loud=_loud(k),
            )
            call_ = _Call((0, keys[b]), (-1, 0 if causal else -1), scale or q.shape[-1] ** -0.5, self.fault(around))
            parts = (t.transpose(0, 1) for t in (qb, ks[b], vs[b]))
            results.append(_apply(*parts, sinks, call_))
        outs, lses = zip(*results, strict=True)
        out, lse = torch.cat(outs, 1).transpose(0, 1), torch.cat(lses, 1)
        return (out, lse) if return_lse or self.always_lse else out


def _loud(k: Tensor) -> bool:
    return not bool((k.abs() <= 16).all())


class _Call(NamedTuple):
    span: tuple[int, int]  # the first valid key of the buffer, and how many
    windows: tuple[int, int]  # keys visible before and after the aligned one, -1 = all
    scale: float
    cut: Cut


def _grid(x: Tensor, bits: int = 20) -> Tensor:
    """``x`` in fp64, on multiples of 2**-bits: sums of products of two such numbers do not round."""
    return torch.round(x.double() * 2.0**bits) * 2.0**-bits


def _cuts(begin: int, end: int, cut: Cut) -> list[tuple[int, int]]:
    marks = [begin, *range(begin + cut.size - cut.lead, end, cut.size), end]
    return [(a, b) for a, b in pairwise(marks) if a < b]


class _Sequence(torch.autograd.Function):
    """One sequence: q ``[Hq, Sq, D]``, k and v ``[Hkv, Skv, D]``, sinks ``[Hq]`` or None; out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Any:
        group = q.shape[0] // k.shape[0]
        qg = _grid(q)
        top = qg.new_full((*q.shape[:2], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(qg)
        first, keys = call.span
        for a, b in _cuts(first, first + keys, call.cut):
            rows = _first_row(a, q, k, call)
            s = _scores(qg, k, a, b, rows, group, call)
            old = top[:, rows:]
            new = torch.maximum(old, s.amax(-1, keepdim=True))
            reference = new.masked_fill(new.isinf(), 0.0)
            keep = _grid(torch.exp(old - reference), 22)
            p = _grid(torch.exp(s - reference), 22)
            part = p @ _grid(v[:, a:b]).repeat_interleave(group, 0)
            total[:, rows:] = _hold(total[:, rows:] * keep + p.sum(-1, keepdim=True))
            out[:, rows:] = _hold(out[:, rows:] * keep + part)
            top[:, rows:] = new
        if sinks is not None:
            sink = sinks.double()[:, None, None]
            new = torch.maximum(top, sink)
            keep = torch.exp(top - new)
            total, out, top = total * keep + torch.exp(sink - new), out * keep, new
        seen = total > 0
        out = torch.where(seen, out / total.masked_fill(~seen, 1.0), 0.0) + 0.0
        lse = torch.where(seen, top + total.log(), -torch.inf)[..., 0]
        out, lse = out.to(q.dtype), lse.to(torch.float64 if q.dtype is torch.float64 else torch.float32)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call: _Call = ctx.call
        dout = torch.zeros_like(out) if grads[0] is None else grads[0]
        dlse = torch.zeros_like(lse) if grads[1] is None else grads[1]
        group = q.shape[0] // k.shape[0]
        qg, dg = _grid(q), _grid(dout)
        delta = (dg * _grid(out)).sum(-1, keepdim=True) - dlse.double()[..., None]
        shift = lse.double().masked_fill(lse.isinf(), torch.inf)[..., None]
        dq, dk, dv = torch.zeros_like(qg), torch.zeros_like(k, dtype=torch.float64), None
        dv = torch.zeros_like(dk)
        first, keys = call.span
        aligned = max(0, first - (k.shape[1] - q.shape[1]))  # the first query whose own key is valid
        for a, b in _cuts(first, first + keys, call.cut):
            rows = _first_row(a, q, k, call)
            p = _grid(torch.exp(_scores(qg, k, a, b, rows, group, call) - shift[:, rows:]))
            dp = dg[:, rows:] @ _grid(v[:, a:b]).repeat_interleave(group, 0).mT
            ds = _grid(p * (dp - delta[:, rows:]))
            dq[:, rows:] = _hold(dq[:, rows:] + ds @ _grid(k[:, a:b]).repeat_interleave(group, 0))
            for u, w in _cuts(aligned, q.shape[1], call.cut):
                u = max(u, rows)
                if u >= w:
                    continue
                part = slice(u - rows, w - rows)
                dk[:, a:b] = _hold(dk[:, a:b] + _grouped(ds[:, part].mT @ qg[:, u:w], group))
                dv[:, a:b] = _hold(dv[:, a:b] + _grouped(p[:, part].mT @ dg[:, u:w], group))
        dsinks = None
        if sinks is not None:
            p = _grid(torch.exp(sinks.double()[:, None, None] - shift))
            dsinks = _grid(-p * delta).sum((1, 2)).to(sinks.dtype)
        return (dq * call.scale).to(q.dtype), (dk * call.scale).to(q.dtype), dv.to(q.dtype), dsinks, None


def _apply(*arguments: Any) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _Sequence.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _hold(x: Tensor) -> Tensor:
    """A partial sum as it is kept from block to block."""
    return x.float().double()


def _grouped(x: Tensor, group: int) -> Tensor:
    """Summed over the query heads of each key head."""
    return x.reshape(-1, group, *x.shape[1:]).sum(1)


def _first_row(key: int, q: Tensor, k: Tensor, call: _Call) -> int:
    """The first query that sees ``key`` or a later one."""
    if call.windows[1] < 0:
        return 0
    return min(max(0, key - call.windows[1] - (k.shape[1] - q.shape[1])), q.shape[1])


def _scores(qg: Tensor, k: Tensor, a: int, b: int, rows: int, group: int, call: _Call) -> Tensor:
    """Scaled scores of queries ``rows..`` against keys ``a..b``, -inf where a query does not see a key."""
    s = qg[:, rows:] @ _grid(k[:, a:b]).repeat_interleave(group, 0).mT * call.scale
    place = torch.arange(rows, qg.shape[1], device=qg.device)[:, None] + (k.shape[1] - qg.shape[1])
    key = torch.arange(a, b, device=qg.device)
    left, right = call.windows
    hidden = torch.zeros(s.shape[1:], dtype=torch.bool, device=qg.device)
    if right >= 0:
        hidden |= key > place + right
    if left >= 0:
        hidden |= key < place - left
    return s.masked_fill(hidden, -torch.inf)
