"""The rows of ``benchmarks/run.py --device cuda``: forward, decode and backward beside cuDNN and flash SDPA.

Prefill and backward in TFLOP/s, rested (20 ms bursts, 60 ms rests) and unrested (40 ms bursts back to back); decode in
microseconds a call, from a CUDA graph of ten. Every peer runs in every round, interleaved, in alternating order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from timing import median
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

import detattn

Call = Callable[[], object]
Row = dict[str, object]
MODES = {"rested": (0.02, 0.06), "unrested": (0.04, 0.0)}  # seconds of a burst, of a rest before it


@dataclass(frozen=True)
class Case:
    """A dense call. ``keys`` None: as many as queries."""

    batch: int
    queries: int
    keys: int | None = None
    causal: bool = True
    head_dim: int = 128
    heads: tuple[int, int] = (32, 8)
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 0  # decode: 0 is a dense cache

    @property
    def length(self) -> int:
        return self.queries if self.keys is None else self.keys

    @property
    def flops(self) -> float:
        pairs = self.queries * self.length - (self.queries * (self.queries - 1) // 2 if self.causal else 0)
        return 4.0 * self.batch * self.heads[0] * self.head_dim * pairs

    def inputs(self, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        shapes = ((self.heads[0], self.queries), (self.heads[1], self.length), (self.heads[1], self.length))
        q, k, v = (
            torch.randn(self.batch, h, n, self.head_dim, device="cuda", dtype=self.dtype, requires_grad=grad)
            for h, n in shapes
        )
        return q, k, v

    def describe(self) -> Row:
        return {
            "batch": self.batch,
            "queries": self.queries,
            "keys": self.length,
            "mask": "causal" if self.causal else "full",
            "head_dim": self.head_dim,
            "heads": f"{self.heads[0]}/{self.heads[1]}",
            "dtype": str(self.dtype).removeprefix("torch."),
        }


LADDER = ((16, 1024), (4, 4096), (2, 8192), (1, 16384))
PREFILL = (
    *(Case(b, n, causal=c) for c in (True, False) for b, n in LADDER),
    *(Case(b, n, causal=c, head_dim=64) for c in (True, False) for b, n in LADDER[1:]),
    *(Case(b, n, causal=c, head_dim=256, heads=(16, 8)) for c in (True, False) for b, n in LADDER[1:3]),
    Case(4, 4096, head_dim=96),
    Case(4, 4096, head_dim=192, heads=(16, 8)),
    Case(4, 4096, dtype=torch.float16),
    *(Case(b, n, keys, causal=c) for c in (True, False) for b, n, keys in ((4, 128, 8192), (2, 512, 16384))),
    *(Case(1, 1024, 32768, causal=c) for c in (True, False)),
)
DECODE = (
    *(Case(1, 1, n) for n in (1024, 2048, 4096, 8192, 32768, 131072)),
    *(Case(b, 1, n) for b, n in ((8, 8192), (32, 8192), (64, 4096), (128, 2048))),
    *(Case(8, 1, 8192, heads=h) for h in ((32, 4), (16, 2), (8, 1), (32, 32))),
    *(Case(b, 1, 8192, head_dim=64) for b in (1, 8)),
    *(Case(b, 1, 8192, page_size=p) for b in (1, 8, 32) for p in (16, 64, 128)),
)
BACKWARD = (
    *(Case(b, n, causal=c) for c in (True, False) for b, n in LADDER),
    Case(2, 8192, head_dim=64),
    Case(2, 4096, head_dim=256, heads=(16, 8)),
)
VARLEN = (
    (8192, 4096, 2048, 1024, 512, 256, 128, 128),
    (128, 4000, 1000, 3000, 777, 5555, 300, 2024),
    (1024,) * 24,
    (8192,) * 3,
)


def sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """PyTorch's attention on one backend. Bottom-right causal with fewer queries than keys is a bias there."""
    gqa = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        if causal and 1 < q.shape[2] < k.shape[2]:
            bias = causal_lower_right(q.shape[2], k.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=gqa)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.shape[2] > 1, enable_gqa=gqa)


# The first that takes the call is the peer.
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def working(calls: dict[str, Call]) -> dict[str, Call]:
    """Those that this machine can run; a peer that cannot is left out, detattn is not."""
    kept = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
        except (RuntimeError, torch.OutOfMemoryError):
            if name == "detattn":
                raise
            continue
        kept[name] = call
    return kept


def timed(call: Call, times: int) -> float:
    """Seconds a call, by events around ``times`` of them."""
    call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def bursts(calls: dict[str, Call], flops: float, mode: str, rounds: int) -> dict[str, float]:
    """TFLOP/s of each call, the median of the rounds."""
    burst, rest = MODES[mode]
    times: dict[str, list[float]] = {n: [] for n in calls}
    count = {n: max(1, round(burst / timed(c, 2))) for n, c in calls.items()}
    for i in range(rounds):
        for name in list(calls) if i % 2 else reversed(calls):
            torch.cuda.synchronize()
            time.sleep(rest)
            times[name].append(timed(calls[name], count[name]))
    return {n: round(flops / median(t) / 1e12, 1) for n, t in times.items()}


def graphed(call: Call, calls: int = 10) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def finished(row: Row, results: dict[str, float], lower_is_better: bool = False) -> Row:
    best = (min if lower_is_better else max)((v for n, v in results.items() if n != "detattn"), default=math.nan)
    row |= results | {"ratio": round(best / results["detattn"] if lower_is_better else results["detattn"] / best, 3)}
    print("  ".join(f"{k} {v}" for k, v in row.items()), flush=True)
    return row


def prefill(rounds: int) -> Iterator[Row]:
    for case in PREFILL:
        q, k, v = case.inputs()
        calls: dict[str, Call] = {"detattn": lambda q=q, k=k, v=v, c=case: detattn.attention(q, k, v, causal=c.causal)}
        for name, backend in PEERS.items():
            peer = {name: lambda q=q, k=k, v=v, c=case, b=backend: sdpa(b, q, k, v, c.causal)}
            if working(peer):
                calls |= peer
                break
        for mode in MODES:
            row = {"kind": "prefill", "unit": "TFLOP/s", "mode": mode, **case.describe()}
            yield finished(row, bursts(calls, case.flops, mode, rounds))


def varlen(rounds: int) -> Iterator[Row]:
    """Packed sequences of mixed lengths; ``ratio`` is against the dense call of 4 x 4096 in the same round."""
    dense = Case(4, 4096)
    qd, kd, vd = dense.inputs()
    for lengths in VARLEN:
        for causal in (True, False):
            q, k, v = (torch.randn(sum(lengths), h, 128, device="cuda", dtype=torch.bfloat16) for h in (32, 8, 8))
            cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
            flops = sum(Case(1, n, causal=causal).flops for n in lengths)
            calls = {
                "packed": lambda q=q, k=k, v=v, cu=cu, c=causal: detattn.attention_varlen(q, k, v, cu, cu, causal=c)
            }
            rate = bursts(calls, flops, "rested", rounds)["packed"]
            same = Case(4, 4096, causal=causal)
            base = bursts(
                {"dense": lambda c=causal: detattn.attention(qd, kd, vd, causal=c)}, same.flops, "rested", rounds
            )
            row: Row = {"kind": "varlen", "unit": "TFLOP/s", "mode": "rested", "lengths": list(lengths)}
            row |= {"mask": "causal" if causal else "full"}
            yield finished(row, {"detattn": rate, "dense_4x4096": base["dense"]})


def paged_cache(t: Tensor, page_size: int, order: Tensor) -> Tensor:
    heads, dim = t.shape[1], t.shape[3]
    cache = torch.empty(order.numel(), page_size, heads, dim, device=t.device, dtype=t.dtype)
    cache[order.flatten().long()] = t.transpose(1, 2).reshape(-1, page_size, heads, dim)
    return cache


def decode(rounds: int) -> Iterator[Row]:
    for case in DECODE:
        q, k, v = case.inputs()
        calls: dict[str, Call] = {"detattn": lambda q=q, k=k, v=v: detattn.attention(q, k, v)}
        if case.page_size:
            table = torch.randperm(case.batch * case.length // case.page_size, device="cuda").int().view(case.batch, -1)
            cache = [paged_cache(t, case.page_size, table) for t in (k, v)]
            cu = torch.arange(case.batch + 1, device="cuda", dtype=torch.int32)
            used = torch.full((case.batch,), case.length, device="cuda", dtype=torch.int32)
            rows = q[:, :, 0].contiguous()
            calls["detattn_dense"] = calls["detattn"]
            calls["detattn"] = lambda r=rows, c=cache, cu=cu, t=table, u=used: detattn.attention_varlen(
                r, *c, cu, block_table=t, seqused_k=u
            )
        calls["cudnn"] = lambda q=q, k=k, v=v: sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, False)
        graphs = {n: graphed(c) for n, c in working(calls).items()}
        times: dict[str, list[float]] = {n: [] for n in graphs}
        for i in range(2 * rounds + 1):
            for name in list(graphs) if i % 2 else reversed(graphs):
                times[name].append(timed(graphs[name].replay, 5))
        row = {"kind": "decode", "unit": "us", **case.describe(), "page_size": case.page_size}
        us = {n: round(median(t) / 10 * 1e6, 2) for n, t in times.items()}
        yield finished(row, us, lower_is_better=True)


def backward(rounds: int) -> Iterator[Row]:
    for case in BACKWARD:
        qkv = case.inputs(grad=True)
        dout = torch.randn(case.batch, case.heads[0], case.queries, case.head_dim, device="cuda", dtype=case.dtype)

        def step(out: Tensor, deterministic: bool = False, qkv=qkv, dout=dout) -> Call:
            def run() -> None:
                torch.use_deterministic_algorithms(deterministic)
                try:
                    torch.autograd.grad(out, qkv, dout, retain_graph=True)
                finally:
                    torch.use_deterministic_algorithms(False)

            return run

        theirs = sdpa(SDPBackend.CUDNN_ATTENTION, *qkv, case.causal)
        calls = {
            "detattn": step(detattn.attention(*qkv, causal=case.causal)),
            "cudnn_deterministic": step(theirs, True),
            "cudnn": step(theirs),
        }
        calls = working(calls)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        calls["detattn"]()
        peak = (torch.cuda.max_memory_allocated() - held) / 2**20
        for mode in MODES:
            row = {"kind": "backward", "unit": "TFLOP/s", "mode": mode, **case.describe(), "peak_mib": round(peak)}
            yield finished(row, bursts(calls, 2.5 * case.flops, mode, rounds))


def overhead() -> Iterator[Row]:
    """Microseconds of host time of a call too small to keep the GPU busy."""
    for grad in (False, True):
        q, k, v = (torch.randn(1, 2, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=grad) for _ in range(3))
        calls: dict[str, Call] = {
            "detattn": lambda q=q, k=k, v=v: detattn.attention(q, k, v),
            "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        }
        best = dict.fromkeys(calls, math.inf)
        for _ in range(15):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(100):
                    call()
                best[name] = min(best[name], (time.perf_counter() - begin) / 100 * 1e6)
        us = {n: round(t, 2) for n, t in best.items()}
        yield finished({"kind": "overhead", "unit": "us", "grad": grad}, us, lower_is_better=True)


def gate() -> str | None:
    """Why no speed may be printed: bits that move, or results that are wrong."""
    for head_dim in (64, 128, 256):
        q, k, v = Case(2, 1500, head_dim=head_dim, heads=(8, 2)).inputs()
        out = detattn.attention(q, k, v)
        for at in (0, 700, 1100, 1499):
            row = slice(at, at + 1)
            if not torch.equal(out[:, :, row], detattn.attention(q[:, :, row], k[:, :, : at + 1], v[:, :, : at + 1])):
                return f"decode differs from prefill at head dim {head_dim}, key {at}"
        want = sdpa(SDPBackend.MATH, q.double(), k.double(), v.double(), True)
        mine, theirs = (
            ((x.double() - want).norm() / want.norm()).item()
            for x in (out, sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, True))
        )
        if not mine <= 2 * theirs:
            return f"relative error {mine:.2e} at head dim {head_dim}, flash SDPA's is {theirs:.2e}"
    return None


KINDS: dict[str, Callable[[int], Iterator[Row]]] = {
    "overhead": lambda _: overhead(),
    "decode": decode,
    "prefill": prefill,
    "varlen": varlen,
    "backward": backward,
}


def rows(kind: str, rounds: int) -> Iterator[Row]:
    """The rows of that kind, each printed as it is measured."""
    torch.manual_seed(0)
    with torch.set_grad_enabled(kind in ("backward", "overhead")):
        yield from KINDS[kind](rounds)
    torch.cuda.empty_cache()
