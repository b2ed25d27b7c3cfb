"""Calls a target with sequences, in every way a call may carry them, and hands back each sequence's own results."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .cases import LONG, Family, Sequence, families, rubbish
from .targets import Target

Result = dict[str, Tensor]
"""Of one sequence: out ``[Hq, Sq, D]``, lse ``[Hq, Sq]``, dq, dk, dv shaped as q, k, v, dsinks ``[Hq]``."""


class TargetError(RuntimeError):
    """The target raised, or returned something that is not attention's result."""


@dataclass
class Runner:
    """One target on one device.

    ``backward`` says whether gradients are taken where a method can take them, ``long`` how many keys the longest
    prefilled sequences of the checks have.
    """

    target: Target
    device: torch.device
    dtype: torch.dtype
    backward: bool
    seed: int = 0
    long: int = LONG

    def families(self) -> tuple[Family, ...]:
        return families(self.target.offers("grouped"), self.target.offers("sinks"), self.seed, self.device, self.dtype)

    def call(
        self,
        packed: bool,
        tensors: tuple[Any, ...],
        dout: Tensor | None,
        dlse: Tensor | None,
        sinks: Tensor | None,
        *,
        causal: bool = True,
        lse: bool | None = None,
        **options: Any,
    ) -> Result:
        """One call of the target, with gradients where ``dout`` is given. Shapes are the call's own.

        ``tensors`` are q, k, v and, packed, the offsets. ``lse`` None asks for it wherever the target
        offers it, and takes it where it comes unasked.

        Raises:
            TargetError: what came back has the wrong type, shape or dtype.
        """
        fn = self.target.packed if packed else self.target.dense
        assert fn is not None
        q, k, v, *offsets = tensors
        wanted = self.target.offers("lse") if lse is None else lse
        if wanted:
            options["return_lse"] = True
        grad = dout is not None and self.backward
        if grad:
            q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
            sinks = None if sinks is None else sinks.detach().requires_grad_()
        if sinks is not None:
            options["sinks"] = sinks
        with torch.set_grad_enabled(grad):
            returned = fn(q, k, v, *offsets, causal=causal, scale=q.shape[-1] ** -0.5, **options)
        out, got_lse = returned if isinstance(returned, tuple) else (returned, None)
        rows = (q.shape[1], q.shape[0]) if packed else q.shape[:3]
        if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
            raise TargetError(f"out is {_describe(out)}; expected {tuple(q.shape)} of {q.dtype}, as q")
        result = {"out": out}
        if wanted or (lse is None and got_lse is not None):
            if got_lse is None or got_lse.shape != rows:
                raise TargetError(f"lse is {_describe(got_lse)}; expected {tuple(rows)}")
            result["lse"] = got_lse
        if grad:
            inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
            outputs, douts = [out], [dout]
            if "lse" in result and result["lse"].requires_grad:
                outputs.append(result["lse"])
                douts.append(dlse)
            grads = torch.autograd.grad(outputs, inputs, douts)
            result.update(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
        return {name: t.detach() for name, t in result.items()}

    def dense(self, seqs: Many[Sequence], *, grad: bool = True, **options: Any) -> list[Result]:
        """The sequences, all of one shape, as one dense batch."""
        q, k, v, dout, dlse = (
            torch.stack([getattr(s, name) for s in seqs]) for name in ("q", "k", "v", "dout", "dlse")
        )
        whole = self.call(False, (q, k, v), dout if grad else None, dlse, seqs[0].sinks, **options)
        return [_sequence(whole, b) for b in range(len(seqs))]

    def alone(self, seq: Sequence, **options: Any) -> Result:
        """The sequence as a batch of one."""
        return self.dense([seq], **options)[0]

    def padded(
        self, seqs: Many[Sequence], room: int, side: str, kind: str, *, grad: bool = True, causal: bool = True
    ) -> list[Result]:
        """The sequences in a batch whose buffers hold ``room`` keys, with rubbish of that kind around them.

        Square sequences have their queries padded alike; others keep theirs. Where gradients are taken the padded
        queries are finite and their dout and dlse zero, as a loss that does not look at them leaves them.
        """
        batch = len(seqs)
        square = seqs[0].queries == seqs[0].keys
        queries = room if square else seqs[0].queries
        first = seqs[0]
        grad = grad and self.backward
        q = rubbish((batch, first.q.shape[0], queries, first.q.shape[2]), first.q, "large" if grad else kind)
        k = rubbish((batch, first.k.shape[0], room, first.k.shape[2]), first.k, kind)
        v = rubbish((batch, first.k.shape[0], room, first.k.shape[2]), first.v, kind)
        dout, dlse = torch.zeros_like(q), first.dlse.new_zeros(q.shape[:3])
        mask = torch.zeros(batch, room, dtype=torch.bool, device=self.device)
        places = []
        for b, seq in enumerate(seqs):
            begin = 0 if side == "right" else room - seq.keys
            keys = slice(begin, begin + seq.keys)
            rows = keys if square else slice(0, queries)
            k[b, :, keys], v[b, :, keys], mask[b, keys] = seq.k, seq.v, True
            q[b, :, rows], dout[b, :, rows], dlse[b, :, rows] = seq.q, seq.dout, seq.dlse
            places.append((rows, keys))
        whole = self.call(
            False,
            (q, k, v),
            dout if grad else None,
            dlse,
            first.sinks,
            causal=causal,
            key_padding_mask=mask,
        )
        return [_sequence(whole, b, rows, keys) for b, (rows, keys) in enumerate(places)]

    def packed(self, seqs: Many[Sequence], *, bound: int | None = None, grad: bool = True) -> list[Result]:
        """The sequences one after the other. ``bound`` is told as both max_seqlen; None tells the longest."""
        tensors = [torch.cat([getattr(s, n).transpose(0, 1) for s in seqs]) for n in ("q", "k", "v", "dout")]
        q, k, v, dout = tensors
        dlse = torch.cat([s.dlse for s in seqs], 1)
        cu_q = _offsets([s.queries for s in seqs], self.device)
        cu_k = _offsets([s.keys for s in seqs], self.device)
        longest = (max(s.queries for s in seqs), max(s.keys for s in seqs))
        options = self._bounds(longest, bound)
        whole = self.call(True, (q, k, v, cu_q, cu_k), dout if grad else None, dlse, seqs[0].sinks, **options)
        return _split(whole, seqs)

    def paged(
        self, seqs: Many[Sequence], page_size: int, *, shuffle: int = 0, shared: int = 0, bound: int | None = None
    ) -> list[Result]:
        """The sequences against a paged cache whose unused slots hold NaN and whose unused entries hold rubbish.

        Args:
            shuffle: the seed of the pages' order in the cache; 0 keeps them in order.
            shared: the first so many keys, equal in all sequences, lie in pages that all share.
            bound: as in ``packed``.
        """
        head = shared // page_size
        counts = [-(-s.keys // page_size) for s in seqs]
        total = sum(counts) - head * (len(seqs) - 1) + 2
        order = torch.arange(total)
        if shuffle:
            order = torch.randperm(total, generator=torch.Generator().manual_seed(shuffle))
        first = seqs[0]
        shape = (total, page_size, first.k.shape[0], first.k.shape[2])
        k, v = rubbish(shape, first.k, "nan"), rubbish(shape, first.v, "nan")
        table = torch.full((len(seqs), max(counts) + 1), 2**30, dtype=torch.int32)
        table[:, -1] = -1
        free = head
        for b, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
            pages = list(range(head)) + list(range(free, free + count - head))
            free += count - head
            for i, page in enumerate(pages):
                place = int(order[page])
                keys = slice(i * page_size, min((i + 1) * page_size, seq.keys))
                k[place, : keys.stop - keys.start] = seq.k[:, keys].transpose(0, 1)
                v[place, : keys.stop - keys.start] = seq.v[:, keys].transpose(0, 1)
                table[b, i] = place
        q = torch.cat([s.q.transpose(0, 1) for s in seqs])
        cu_q = _offsets([s.queries for s in seqs], self.device)
        used = torch.tensor([s.keys for s in seqs], dtype=torch.int32, device=self.device)
        longest = (max(s.queries for s in seqs), max(s.keys for s in seqs))
        whole = self.call(
            True,
            (q, k, v, cu_q, None),
            None,
            None,
            first.sinks,
            block_table=table.to(self.device),
            seqused_k=used,
            **self._bounds(longest, bound),
        )
        return _split(whole, seqs)

    def _bounds(self, longest: tuple[int, int], bound: int | None) -> dict[str, Any]:
        if not self.target.offers("bounds"):
            return {}
        queries, keys = longest if bound is None else (bound, bound)
        return {"max_seqlen_q": queries, "max_seqlen_k": keys}


def rows_of(result: Result, begin: int, end: int) -> Result:
    """The part of a forward result that belongs to queries ``begin..end``."""
    return {name: result[name][:, begin:end] for name in ("out", "lse") if name in result}


def _sequence(whole: Result, b: int, rows: slice = slice(None), keys: slice = slice(None)) -> Result:
    """Sequence ``b`` of a dense batch. dsinks belong to the batch, so only a batch of one has them."""
    result = {name: t[b, :, keys if name in ("dk", "dv") else rows] for name, t in whole.items() if name != "dsinks"}
    if "dsinks" in whole and whole["out"].shape[0] == 1:
        result["dsinks"] = whole["dsinks"]
    return result


def _split(whole: Result, seqs: Many[Sequence]) -> list[Result]:
    """The sequences of a packed call, in the dense form's order of dimensions."""
    queries, keys = [s.queries for s in seqs], [s.keys for s in seqs]
    parts: dict[str, tuple[Tensor, ...]] = {}
    for name, t in whole.items():
        if name == "lse":
            parts[name] = torch.split(t, queries, 1)
        elif name in ("dk", "dv"):
            parts[name] = tuple(p.transpose(0, 1) for p in torch.split(t, keys))
        elif name != "dsinks":
            parts[name] = tuple(p.transpose(0, 1) for p in torch.split(t, queries))
    return [{name: part[i] for name, part in parts.items()} for i in range(len(seqs))]


def _offsets(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def in_words(error: Exception) -> str:
    """Type and message of what a target raised, on one line of bearable length."""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message if len(message) <= 300 else message[:300] + ' ..'}"


def _describe(value: object) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
