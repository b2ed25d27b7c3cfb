"""The checks, one a promise. Each yields pairs of results whose bytes must be equal.

Small cases come first: a control is mostly found in them, and then no more of it is run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from .. import contract
from . import execution
from .cases import QUERY_TILES, VERY_LONG, Family, Sequence, edges
from .faulty import FAULTS
from .runner import Result, Runner, rows_of


class Pair(NamedTuple):
    """Two results that must be equal byte for byte, in the tensors that both hold."""

    case: str
    expected: Result
    got: Result


Body = Callable[[Runner], Iterator[Pair]]


@dataclass(frozen=True)
class Check:
    """One promise put to the test.

    ``text`` says what is compared with what. Without the features of ``needs``, and one of ``needs_one_of`` where it
    names any, there is nothing to test.
    """

    id: str
    text: str
    body: Body
    needs: tuple[str, ...] = ()
    needs_one_of: tuple[str, ...] = ()

    @property
    def gradients(self) -> bool:
        """Whether the promise covers gradients."""
        return contract.promise(self.id).scope != "forward"

    @property
    def control(self) -> str:
        """The planted fault that the check must find, in words."""
        return FAULTS[self.id].text

    @property
    def requirements(self) -> str:
        """The features that the check needs, in words; empty where it needs none."""
        return ", ".join([*self.needs, *([" or ".join(self.needs_one_of)] if self.needs_one_of else [])])


CHECKS: dict[str, Check] = {}


def check(
    id: str, text: str, needs: tuple[str, ...] = (), needs_one_of: tuple[str, ...] = ()
) -> Callable[[Body], Body]:
    """Registers the decorated function as the check of promise ``id``."""

    def register(body: Body) -> Body:
        contract.promise(id)
        CHECKS[id] = Check(id, text, body, needs, needs_one_of)
        return body

    return register


@check("rerun", "a call repeated, alone and from several threads at once")
def _rerun(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        for length in (300, r.long):
            seq = family.sequence(length)
            first = r.alone(seq)
            for n in range(2, 6 if length == 300 else 3):
                yield Pair(f"call {n}, {length} tokens ({family})", first, r.alone(seq))
            for n, got in enumerate(execution.concurrent(r.device, partial(r.alone, seq), 3 if length == 300 else 2)):
                yield Pair(f"under load, thread {n}, {length} tokens ({family})", first, got)


@check("batch-size", "a sequence alone, and first in batches of 2 to 33")
def _batch_size(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        seqs = family.sequences(8, 300)
        alone = r.alone(seqs[0])
        for n in (2, 3, 8):
            yield Pair(f"batch of {n}, 300 tokens ({family})", alone, r.dense(seqs[:n])[0])
        seqs = family.sequences(2, r.long)
        yield Pair(f"batch of 2, {r.long} tokens ({family})", r.alone(seqs[0]), r.dense(seqs)[0])
        # One query sees every key, so it needs no causal alignment.
        family = family.wide()
        seqs = family.sequences(3, 1, r.long)
        alone = r.alone(seqs[0], grad=False, causal=False)
        for n in (2, 5, 16, 17, 33):
            batch = [seqs[0], *(seqs[1 + i % 2] for i in range(n - 1))]
            got = r.dense(batch, grad=False, causal=False)[0]
            yield Pair(f"batch of {n}, 1 query on {r.long} keys ({family})", alone, got)


@check("batch-position", "every sequence of a batch, in every place of it")
def _batch_position(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        for seqs, grad, causal in (
            (family.sequences(4, 300), True, True),
            (family.sequences(2, r.long), True, True),
            (family.wide().sequences(5, 1, r.long), False, False),
        ):
            first = r.dense(seqs, grad=grad, causal=causal)
            for turn in range(1, len(seqs)):
                turned = r.dense(seqs[turn:] + seqs[:turn], grad=grad, causal=causal)
                for place, got in enumerate(turned):
                    of = (place + turn) % len(seqs)
                    yield Pair(f"place {of} moved to {place}, {seqs[of]} ({family})", first[of], got)


@check("neighbours", "a sequence between other neighbours: other data, loud, NaN, shorter, longer")
def _neighbours(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        for queries, keys in ((300, 300), (1, r.long), (r.long, r.long)):
            grad = causal = queries > 1
            wide = family if causal else family.wide()
            ours, one, two = wide.sequences(3, queries, keys)
            nan = replace(one, q=one.q * math.nan, k=one.k * math.nan, v=one.v * math.nan)
            others = {
                "loud": [wide.sequence(queries, keys, 3, loudness=30.0)] * 2,
                "other data": [two, one],
                "NaN": [nan, two],
            }
            expected = r.dense([one, ours, two], grad=grad, causal=causal)[1]
            for kind, (one, two) in list(others.items())[: 1 if queries == r.long else 3]:
                got = r.dense([one, ours, two], grad=grad, causal=causal)[1]
                yield Pair(f"{kind} neighbours, {ours} ({family})", expected, got)
        ours = family.sequence(513)
        for feature, call in (
            ("padding", lambda seqs: r.padded(seqs, 700, "right", "large")),
            ("packed", r.packed),
        ):
            if r.target.offers(feature):
                expected = call([family.sequence(200), ours, family.sequence(300)])[1]
                for lengths in ((1, 37), (700, 129)):
                    first, last = (family.sequence(n) for n in lengths)
                    what = f"513 tokens between {lengths[0]} and {lengths[1]}, {feature}"
                    yield Pair(f"{what} ({family})", expected, call([first, ours, last])[1])


@check("chunked-prefill", "a prompt at once, and cut into calls", needs=("bottom-right",))
def _chunked_prefill(r: Runner) -> Iterator[Pair]:
    lists = (
        ([767, 1], [1024], [*[1] * 4, 768, 33], [32] * 5),
        ([769, 31], [248, 1024], list(edges(64, 700))),
    )
    for family, cuts in zip(r.families(), lists, strict=True):
        seq = family.sequence(r.long)
        whole = r.alone(seq, grad=False)
        for sizes in cuts:
            ends = [e for e in accumulate(sizes) if e < r.long]
            for begin, end in pairwise([0, *ends, r.long]):
                got = r.alone(seq.cut(begin, end), grad=False)
                what = f"queries {begin}..{end} of {r.long}, calls of {', '.join(map(str, sizes[:6]))}, .."
                yield Pair(f"{what} ({family})", rows_of(whole, begin, end), got)


@check("decode", "one query, and a few, against the cache, and the prefill of the whole", needs=("bottom-right",))
def _decode(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        seq = family.sequence(r.long)
        whole = r.alone(seq, grad=False)
        spans = [(keys - 1, keys) for keys in edges(family.head_dim, r.long)]
        spans += [(keys - n, keys) for keys in (130, 513, r.long) for n in (2, 3, 4, 5, 8, 16, 17)]
        spans += [(r.long - n, r.long) for n in QUERY_TILES]
        for begin, end in (span for span in spans if span[0] >= 0 and span[1] <= r.long):
            got = r.alone(seq.cut(begin, end), grad=False)
            what = f"queries {begin}..{end} alone, against the prefill of {r.long}"
            yield Pair(f"{what} ({family})", rows_of(whole, begin, end), got)
        for keys in (130, 300, 513, 1025, r.long, VERY_LONG):
            far = family.wide().sequence(40, keys)
            many = r.alone(far, grad=False)
            for begin, end in ((39, 40), (7, 8), (38, 40), (23, 40)):
                got = r.alone(far.cut(begin, end), grad=False)
                what = f"queries {begin}..{end} alone, against 40 on {keys} keys"
                yield Pair(f"{what} ({family.wide()})", rows_of(many, begin, end), got)


def _padding(r: Runner, side: str) -> Iterator[Pair]:
    def pairs(seqs: list[Sequence], room: int, kind: str, grad: bool = True, causal: bool = True) -> Iterator[Pair]:
        alone = [r.alone(s, grad=grad, causal=causal) for s in seqs]
        for seq, want, got in zip(seqs, alone, r.padded(seqs, room, side, kind, grad=grad, causal=causal), strict=True):
            what = f"{seq}{'' if causal else ' not causal'} in a buffer of {room}, padding holds {kind}"
            yield Pair(f"{what} ({family})", want, got)

    for family in r.families():
        batch = [family.sequence(n) for n in (700, 513, 1)]
        one, long = family.wide().sequence(1, r.long), family.sequence(r.long)
        yield from pairs([family.sequence(300)], 340, "large")
        yield from pairs(batch, 701, "large")
        # Left padding under a causal mask alone leaves gradients: otherwise padded queries see real keys first.
        yield from pairs(batch, 999, "large", grad=side == "right", causal=False)
        yield from pairs([long], r.long + 75, "large")
        yield from pairs([one], r.long + 100, "large", grad=False, causal=False)
        for kind in ("nan", "inf"):
            if r.backward:  # with gradients the padded queries are finite, without them they hold rubbish too
                yield from pairs(batch, 765, kind)
            yield from pairs(batch, 765, kind, grad=False)
            yield from pairs([one], r.long + 100, kind, grad=False, causal=False)


@check("right-padding", "a sequence alone, and before rubbish in a padded batch", needs=("padding",))
def _right_padding(r: Runner) -> Iterator[Pair]:
    yield from _padding(r, "right")


@check("left-padding", "a sequence alone, and after rubbish in a padded batch", needs=("padding",))
def _left_padding(r: Runner) -> Iterator[Pair]:
    yield from _padding(r, "left")


@check("packed", "each sequence alone, in a dense batch, and packed in two orders", needs=("packed",))
def _packed(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        same = family.sequences(3, 300)
        for n, (want, got) in enumerate(zip(r.dense(same), r.packed(same), strict=True)):
            yield Pair(f"sequence {n} of a dense batch of 3 ({family})", want, got)
        seqs = [family.sequence(n) for n in (127, r.long, 1, 128, 129, 513)]
        alone = [r.alone(s) for s in seqs]
        for order in ((0, 1, 2, 3, 4, 5), (4, 2, 5, 0, 3, 1)):
            for i, got in zip(order, r.packed([seqs[i] for i in order]), strict=True):
                yield Pair(f"{seqs[i]}, order {order} ({family})", alone[i], got)
        if r.target.offers("bottom-right"):
            shapes = ((1, r.long), (300, 300), (5, 1025), (33, 90))
            mixed = [family.sequence(queries, keys) for queries, keys in shapes]
            for seq, got in zip(mixed, r.packed(mixed, grad=False), strict=True):
                yield Pair(f"{seq}, packed with others ({family})", r.alone(seq, grad=False), got)


@check("paged", "a contiguous cache, and pages of several sizes in several orders", needs=("paged", "bottom-right"))
def _paged(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        family = family.wide()
        shapes = ((17, 1025), (1, r.long), (129, 700), (1, 16), (300, 300))
        seqs = [family.sequence(queries, keys) for queries, keys in shapes]
        alone = [r.alone(s, grad=False) for s in seqs]
        sharing = [family.sequence(queries, 900, number) for number, queries in enumerate((1, 3, 200))]
        for seq in sharing[1:]:
            seq.k[:, :512], seq.v[:, :512] = sharing[0].k[:, :512], sharing[0].v[:, :512]
        alone_sharing = [r.alone(s, grad=False) for s in sharing]
        for size in r.target.page_sizes:
            for order, shuffle in (("in order", 0), ("shuffled", 7)):
                for seq, want, got in zip(seqs, alone, r.paged(seqs, size, shuffle=shuffle), strict=True):
                    yield Pair(f"{seq}, pages of {size} {order} ({family})", want, got)
            shared = r.paged(sharing, size, shuffle=3, shared=512)
            for seq, want, got in zip(sharing, alone_sharing, shared, strict=True):
                yield Pair(f"{seq}, the first pages of {size} shared ({family})", want, got)


@check("layout", "contiguous tensors, and the same numbers in other strides, forward and backward")
def _layout(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        for seqs, grad in ((family.sequences(1, 300), True), (family.sequences(2, r.long), False)):
            for name, expected, got in execution.layouts(r, seqs, grad):
                yield Pair(f"{name}, {seqs[0]} ({family})", expected, got)


@check("heads", "all heads, a slice of them, and key heads repeated for each query head")
def _heads(r: Runner) -> Iterator[Pair]:
    for family, seq, causal in _shapes(r):
        whole = r.alone(seq, grad=False, causal=causal)
        group, half = family.heads // family.kv_heads, family.kv_heads // 2
        for begin in range(0, family.kv_heads, half):
            end = begin + half
            expected = {name: t[begin * group : end * group] for name, t in whole.items()}
            got = r.alone(seq.heads(begin, end), grad=False, causal=causal)
            yield Pair(f"key heads {begin}..{end}, {seq} ({family})", expected, got)
        if group > 1:
            repeated = replace(seq, k=seq.k.repeat_interleave(group, 0), v=seq.v.repeat_interleave(group, 0))
            got = r.alone(repeated, grad=False, causal=causal)
            yield Pair(f"keys and values repeated {group} times, {seq} ({family})", whole, got)


@check("bounds", "max_seqlen exact, and larger", needs=("packed", "bounds"))
def _bounds(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        for lengths, bounds in (((129, 300, 1), (301, 4096, 2**20)), ((513, r.long, 1), (2**15,))):
            seqs = [family.sequence(n) for n in lengths]
            exact = r.packed(seqs)
            for bound in bounds:
                for seq, want, got in zip(seqs, exact, r.packed(seqs, bound=bound), strict=True):
                    yield Pair(f"{seq}, max_seqlen {bound} ({family})", want, got)
        if r.target.offers("paged"):
            family = family.wide()
            seqs, size = [family.sequence(1, n) for n in (513, r.long, 1)], r.target.page_sizes[-1]
            for seq, want, got in zip(seqs, r.paged(seqs, size), r.paged(seqs, size, bound=2**20), strict=True):
                yield Pair(f"{seq}, paged, max_seqlen {2**20} ({family})", want, got)


def _shapes(r: Runner) -> Iterator[tuple[Family, Sequence, bool]]:
    """Every family with a prompt, one query against a cache, a long prompt; and whether causal matters to it."""
    for family in r.families():
        yield family, family.sequence(513), True
        yield family.wide(), family.wide().sequence(1, r.long), False
        yield family, family.sequence(r.long), True


@check("mask-neutral", "no mask, and masks that hide nothing", needs_one_of=("window", "padding"))
def _mask_neutral(r: Runner) -> Iterator[Pair]:
    for family, seq, causal in _shapes(r):
        plain = r.alone(seq, grad=False, causal=causal)
        if r.target.offers("window"):
            for left in (seq.keys, seq.keys + 1000):
                got = r.alone(seq, grad=False, causal=causal, window_left=left)
                yield Pair(f"window of {left}, {seq} ({family})", plain, got)
        if r.target.offers("padding"):
            mask = torch.ones(1, seq.keys, dtype=torch.bool, device=r.device)
            got = r.alone(seq, grad=False, causal=causal, key_padding_mask=mask)
            yield Pair(f"all-True mask, {seq} ({family})", plain, got)


@check("execution", "an eager call, and other thread counts, torch.compile, CUDA graph replay, a side stream")
def _execution(r: Runner) -> Iterator[Pair]:
    for family in r.families():
        for queries, keys in ((300, 300), (1, r.long), (r.long, r.long)):
            grad = causal = queries > 1
            seq = (family if causal else family.wide()).sequence(queries, keys)
            expected = r.alone(seq, grad=grad, causal=causal)
            for name, got in execution.ways(r, seq, grad=grad, causal=causal):
                yield Pair(f"{name}, {seq} ({family})", expected, got)
    seq = r.families()[-1].sequence(300)
    for name, got in execution.compiled(r, seq):
        yield Pair(f"{name}, {seq}", r.alone(seq, grad=False), got)


@check("lse-request", "out with lse asked for, and without", needs=("lse",))
def _lse_request(r: Runner) -> Iterator[Pair]:
    for family, seq, causal in _shapes(r):
        asked = r.alone(seq, grad=False, causal=causal, lse=True)
        not_asked = r.alone(seq, grad=False, causal=causal, lse=False)
        yield Pair(f"{seq} ({family})", {"out": asked["out"]}, not_asked)
