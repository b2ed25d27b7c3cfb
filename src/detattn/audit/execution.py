"""The same call made otherwise: other threads, streams, graphs, the compiler, other strides."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .cases import Sequence
from .runner import Result, Runner


@contextmanager
def threads(count: int) -> Iterator[None]:
    """PyTorch's CPU threads for the block, the former number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def concurrent(device: torch.device, call: Callable[[], Result], times: int) -> list[Result]:
    """The call, made by that many threads at once; on CUDA beside a stream that is kept busy."""
    busy = None
    if device.type == "cuda":
        busy = _stream(device)
        with torch.cuda.stream(busy):
            noise = torch.ones(4096, 4096, device=device)
            for _ in range(8):
                noise = noise @ noise * 0.0
    with ThreadPoolExecutor(times) as pool:
        results = list(pool.map(lambda _: call(), range(times)))
    if busy is not None:
        busy.synchronize()
    return results


def ways(r: Runner, seq: Sequence, *, grad: bool = True, causal: bool = True) -> Iterator[tuple[str, Result]]:
    """The sequence alone: with other thread counts on the CPU; on a side stream and from a CUDA graph on CUDA."""
    if r.device.type != "cuda":
        here = torch.get_num_threads()
        for count in sorted({1, 2, 3, here + 1} - {here}):
            with threads(count):
                yield f"threads {count} instead of {here}", r.alone(seq, grad=grad, causal=causal)
        return
    stream = _stream(r.device)
    stream.wait_stream(torch.cuda.current_stream(r.device))
    with torch.cuda.stream(stream):
        result = r.alone(seq, grad=grad, causal=causal)
    torch.cuda.current_stream(r.device).wait_stream(stream)
    yield "side stream", result
    if r.target.offers("graph"):
        yield "CUDA graph replay", _replayed(r, seq, causal)


def _replayed(r: Runner, seq: Sequence, causal: bool) -> Result:
    """The forward, captured and replayed twice over outputs that hold something else before."""
    stream = _stream(r.device)
    stream.wait_stream(torch.cuda.current_stream(r.device))
    with torch.cuda.stream(stream):
        r.alone(seq, grad=False, causal=causal)
    torch.cuda.current_stream(r.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = r.alone(seq, grad=False, causal=causal)
    for _ in range(2):
        for t in result.values():
            t.fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize(r.device)
    return {name: t.clone() for name, t in result.items()}


def compiler_missing(device: torch.device) -> str | None:
    """Why ``torch.compile`` cannot work here, None where it can."""
    if sys.version_info >= (3, 15):
        return f"torch.compile does not support Python {sys.version_info.major}.{sys.version_info.minor}"
    if device.type == "cuda":
        return None if find_spec("triton") else "Triton is not installed"
    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    return None if compiler and shutil.which(compiler) else "no C++ compiler was found"


def compiled(r: Runner, seq: Sequence) -> Iterator[tuple[str, Result]]:
    """The forward of the sequence under ``torch.compile``; nothing where the target or the machine has no compiler."""
    if not r.target.offers("compile") or compiler_missing(r.device) is not None:
        return
    lse = {"return_lse": True} if r.target.offers("lse") else {}
    sinks = {} if seq.sinks is None else {"sinks": seq.sinks}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return r.target.dense(q, k, v, causal=True, scale=q.shape[-1] ** -0.5, **lse, **sinks)

    with torch.no_grad():
        returned = torch.compile(call, dynamic=False)(seq.q[None], seq.k[None], seq.v[None])
    parts = returned if isinstance(returned, tuple) else (returned,)
    yield "torch.compile", {name: t[0] for name, t in zip(("out", "lse"), parts, strict=False)}


def layouts(r: Runner, seqs: Many[Sequence], grad: bool) -> Iterator[tuple[str, Result, Result]]:
    """A dense batch of the sequences, contiguous and in other strides: name, contiguous result, strided result."""
    q, k, v, dout, dlse = (torch.stack([getattr(s, n) for s in seqs]) for n in ("q", "k", "v", "dout", "dlse"))
    sinks = seqs[0].sinks

    def call(*tensors: Tensor) -> Result:
        return r.call(False, tensors[:3], tensors[3] if grad else None, dlse, sinks)

    plain = call(q, k, v, dout)
    for name, change in _CHANGES.items():
        yield name, plain, call(*(change(t) for t in (q, k, v, dout)))
    one_head = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    expanded = call(q, *one_head, dout)
    yield "heads expanded", call(q, *(t.contiguous() for t in one_head), dout), expanded
    if grad and r.backward:
        yield "gradient alone transposed", plain, call(q, k, v, _transposed(dout))
        same = dout[:, :, :1, :1].expand_as(dout)
        yield "gradient expanded", call(q, k, v, same.contiguous()), call(q, k, v, same)


def _transposed(t: Tensor) -> Tensor:
    """[B, H, S, D] as a view of [B, S, H, D]."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(t: Tensor) -> Tensor:
    """Cut out of a larger tensor that holds NaN elsewhere, at an odd offset."""
    b, h, s, d = t.shape
    larger = t.new_full((b, h + 1, s + 3, d + 5), float("nan"))
    view = larger[:, 1:, 2 : s + 2, 3 : d + 3]
    view.copy_(t)
    return view


def _columns(t: Tensor) -> Tensor:
    """The head dim strided: [B, H, S, D] as a view of [B, H, D, S]."""
    return t.mT.contiguous().mT


_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, S, H, D] views": _transposed,
    "slices of larger tensors": _sliced,
    "head dim strided": _columns,
}
