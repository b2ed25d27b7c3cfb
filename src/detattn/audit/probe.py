"""Before its bits are compared: does the target compute attention, in the conventions that the checks call it with?

A function that returns zeros breaks no promise, and one that aligns its causal mask otherwise would look as if it broke
many. Attention itself and each feature are tried once, on a small case, against fp64 with a generous tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .cases import Family, Sequence
from .runner import Result, Runner, in_words

TOLERANCE = 0.06
"""Of the largest magnitude expected, and absolute: far above any dtype's error, far below a wrong mask's."""


@dataclass
class Probed:
    """``broken`` maps a feature (``"attention"`` itself too) to what went wrong, ``lacks`` to why it is not there."""

    broken: dict[str, str] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)


def exact(seq: Sequence, *, causal: bool = True, window_left: int = -1, shift: int | None = None) -> Result:
    """``out`` and ``lse`` of a sequence in fp64; ``shift`` is the place of query 0 among the keys."""
    group = seq.q.shape[0] // seq.k.shape[0]
    q, k, v = seq.q.double(), *(t.double().repeat_interleave(group, 0) for t in (seq.k, seq.v))
    shift = seq.keys - seq.queries if shift is None else shift
    place = torch.arange(seq.queries, device=q.device)[:, None] + shift
    key = torch.arange(seq.keys, device=q.device)
    hidden = torch.zeros(seq.queries, seq.keys, dtype=torch.bool, device=q.device)
    if causal:
        hidden |= key > place
    if window_left >= 0:
        hidden |= key < place - window_left
    s = (q @ k.mT * seq.q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
    lse = s.logsumexp(-1)
    if seq.sinks is not None:
        lse = torch.logaddexp(lse, seq.sinks.double()[:, None])
    return {"out": torch.exp(s - lse[..., None]) @ v, "lse": lse}


def _off(got: Result, wanted: Result) -> str | None:
    """What is wrong with a result in words, None where nothing is."""
    for name in wanted.keys() & got.keys():
        error = (got[name].double() - wanted[name]).abs()
        if not bool((error <= TOLERANCE * (1 + wanted[name].abs().max())).all()):
            return f"{name} is not exact attention's, off by up to {float(error.max()):.2g}"
    return None


def _family(r: Runner, heads: int = 2, sinks: bool = False) -> Family:
    return Family(heads, 2, 64, sinks, r.seed, r.device, r.dtype)


def _attention(r: Runner) -> str | None:
    seqs = _family(r).sequences(2, 37)
    lse = False if r.target.offers("lse") else None
    for causal in (True, False):
        for seq, got in zip(seqs, r.dense(seqs, grad=False, lse=lse, causal=causal), strict=True):
            if wrong := _off(got, exact(seq, causal=causal)):
                return f"{wrong}, for q, k and v of [2, 2, 37, 64] with causal={causal}"
    return None


def _lse(r: Runner) -> str | None:
    seq = _family(r).sequence(37)
    return _off(r.alone(seq, grad=False, lse=True), exact(seq))


def _grouped(r: Runner) -> str | None:
    seq = _family(r, heads=4).sequence(37)
    return _off(r.alone(seq, grad=False), exact(seq))


def _bottom_right(r: Runner) -> str | None:
    seq = _family(r).sequence(3, 7)
    return _off(r.alone(seq, grad=False), exact(seq))


def _padding(r: Runner) -> str | None:
    seqs = [_family(r).sequence(n) for n in (9, 20)]
    return _off(r.padded(seqs, 24, "left", "large", grad=False)[0], exact(seqs[0]))


def _window(r: Runner) -> str | None:
    seq = _family(r).sequence(20)
    return _off(r.alone(seq, grad=False, window_left=5), exact(seq, window_left=5))


def _sinks(r: Runner) -> str | None:
    seq = _family(r, sinks=True).sequence(20)
    return _off(r.alone(seq, grad=False), exact(seq))


def _packed(r: Runner) -> str | None:
    seqs = [_family(r).sequence(n) for n in (9, 20)]
    return _off(r.packed(seqs, grad=False)[1], exact(seqs[1]))


def _paged(r: Runner) -> str | None:
    seqs = [_family(r).sequence(n) for n in (9, 20)]
    return _off(r.paged(seqs, r.target.page_sizes[0])[1], exact(seqs[1]))


def _backward(r: Runner) -> str | None:
    seq = _family(r).sequence(20)
    got = replace(r, backward=True).alone(seq, lse=False)
    q, k, v = (t.double().requires_grad_() for t in (seq.q, seq.k, seq.v))
    out = exact(replace(seq, q=q, k=k, v=v))["out"]
    wanted = torch.autograd.grad(out, (q, k, v), seq.dout.double())
    return _off(got, dict(zip(("dq", "dk", "dv"), wanted, strict=True)))


_TRIALS: dict[str, Callable[[Runner], str | None]] = {
    "attention": _attention,
    "lse": _lse,
    "grouped": _grouped,
    "bottom-right": _bottom_right,
    "padding": _padding,
    "window": _window,
    "sinks": _sinks,
    "packed": _packed,
    "paged": _paged,
    "backward": _backward,
}


def _aligned_top_left(r: Runner) -> bool:
    seq = _family(r).sequence(3, 7)
    return _off(r.alone(seq, grad=False, lse=False), exact(seq, shift=0)) is None


def _requires_grad(r: Runner) -> bool:
    seq = _family(r).sequence(20)
    q: Tensor = seq.q[None].clone().requires_grad_()
    with torch.enable_grad():
        returned = r.target.dense(q, seq.k[None], seq.v[None], causal=True, scale=0.125)
    return bool((returned[0] if isinstance(returned, tuple) else returned).requires_grad)


def probe(r: Runner) -> Probed:
    """Tries attention itself, then each feature that the target offers.

    What a trial raises is recorded in ``broken`` and ends up in the report as the error of every check concerned.
    """
    found = Probed()
    for feature, trial in _TRIALS.items():
        if feature != "attention" and not r.target.offers(feature):
            continue
        try:
            if feature == "backward" and not _requires_grad(r):
                found.lacks[feature] = "its result does not require grad"
                continue
            wrong = trial(r)
            if wrong and feature == "bottom-right" and _aligned_top_left(r):
                found.lacks[feature] = "its causal mask is aligned top-left where there are fewer queries than keys"
                continue
        except Exception as error:
            wrong = f"raised {in_words(error)}"
        if wrong is None:
            continue
        found.broken[feature] = wrong
        if feature == "attention":
            break
        found.broken[feature] += f" (a target without it says so: Target.of(fn, lacks={{{feature!r}: reason}}))"
    return found
