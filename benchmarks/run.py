"""``make bench``: detattn beside PyTorch's attention on this machine, correctness first.

Prints a table and writes ``benchmarks/results/cpu.json``, with ``--device cuda`` a file named after the GPU. A red gate
prints no speed and exits 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import gpu
import torch
import torch.nn.functional as F
from provenance import provenance
from timing import batched, interleaved, median
from torch import Tensor

import detattn

RESULTS = Path(__file__).parent / "results"
HEADS_Q, HEADS_KV, HEAD_DIM = 32, 8, 128
Inputs = tuple[Tensor, Tensor, Tensor]


def inputs(length: int, dtype: torch.dtype, grad: bool = False) -> Inputs:
    g = torch.Generator().manual_seed(length)
    shapes = ((1, h, length, HEAD_DIM) for h in (HEADS_Q, HEADS_KV, HEADS_KV))
    q, k, v = (torch.randn(s, generator=g).to(dtype).requires_grad_(grad) for s in shapes)
    return q, k, v


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True
    )


def gate() -> str | None:
    """Why no speed may be printed: bits that move, or results that are wrong."""
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = inputs(700, dtype)
        out = detattn.attention(q, k, v)
        if not torch.equal(out[:, :, 650:651], detattn.attention(q[:, :, 650:651], k[:, :, :651], v[:, :, :651])):
            return f"decode differs from prefill in {dtype}"
        want = sdpa_repeated(q.double(), k.double(), v.double())
        mine, theirs = ((x.double() - want).norm() / want.norm() for x in (out, sdpa_repeated(q, k, v)))
        if not mine <= 2 * theirs + 1e-6:
            return f"relative error {mine:.2e} in {dtype}, PyTorch's is {theirs:.2e}"
    return None


def training_step(call: Callable[..., object], qkv: Inputs, dout: Tensor) -> Callable[[], object]:
    def run() -> None:
        torch.autograd.backward(call(*qkv), dout)
        for t in qkv:
            t.grad = None

    return run


def backward_only(call: Callable[..., Tensor], qkv: Inputs, dout: Tensor) -> Callable[[], object]:
    out = call(*qkv)
    return lambda: torch.autograd.grad(out, qkv, dout, retain_graph=True)


def throughput(lengths: list[int], seconds: float) -> list[dict[str, object]]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for length in lengths:
            flops = 4 * HEADS_Q * length * length * HEAD_DIM / 2
            q, k, v = inputs(length, dtype)
            forward = {
                "detattn": lambda q=q, k=k, v=v: detattn.attention(q, k, v),
                "sdpa_gqa": lambda q=q, k=k, v=v: sdpa_gqa(q, k, v),
                "sdpa_repeated": lambda q=q, k=k, v=v: sdpa_repeated(q, k, v),
            }
            with torch.no_grad():
                rows.append(row("forward", dtype, length, flops, interleaved(forward, seconds=seconds, min_rounds=3)))
            qkv = inputs(length, dtype, grad=True)
            dout = torch.randn(1, HEADS_Q, length, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
            calls = {"detattn": detattn.attention, "sdpa_gqa": sdpa_gqa, "sdpa_repeated": sdpa_repeated}
            backward = {n: backward_only(c, qkv, dout) for n, c in calls.items()}
            rows.append(
                row("backward", dtype, length, 2.5 * flops, interleaved(backward, seconds=seconds, min_rounds=3))
            )
            print_row(rows[-2])
            print_row(rows[-1])
    return rows


def row(kind: str, dtype: torch.dtype, length: int, flops: float, times: dict[str, list[float]]) -> dict[str, object]:
    speed = {name: flops / median(t) / 1e9 for name, t in times.items()}
    best = max(s for name, s in speed.items() if name != "detattn")
    return {
        "kind": kind,
        "dtype": str(dtype).removeprefix("torch."),
        "length": length,
        "gflops": {n: round(s, 1) for n, s in speed.items()},
        "ratio_to_best_sdpa": round(speed["detattn"] / best, 3),
        "rounds": len(times["detattn"]),
    }


def print_row(r: dict[str, object]) -> None:
    speeds = "  ".join(f"{n} {s:7.1f}" for n, s in r["gflops"].items())  # type: ignore[attr-defined]
    print(f"{r['kind']:9}{r['dtype']:9}{r['length']:6}  {speeds}  GFLOP/s  x{r['ratio_to_best_sdpa']:.2f}", flush=True)


def overhead(seconds: float) -> dict[str, object]:
    """Microseconds of a call too small to compute anything, with and without gradients."""
    q, k, v = (torch.randn(1, 1, 1, 8) for _ in range(3))
    qg, kg, vg = (t.clone().requires_grad_() for t in (q, k, v))
    dout = torch.ones(1, 1, 1, 8)
    count = 200
    sdpa = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    variants = {
        "no_grad": {"detattn": lambda: detattn.attention(q, k, v), "sdpa": lambda: sdpa(q, k, v)},
        "forward_with_grad": {"detattn": lambda: detattn.attention(qg, kg, vg), "sdpa": lambda: sdpa(qg, kg, vg)},
        "forward_and_backward": {
            "detattn": training_step(detattn.attention, (qg, kg, vg), dout),
            "sdpa": training_step(sdpa, (qg, kg, vg), dout),
        },
    }
    result: dict[str, object] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, calls in variants.items():
        times = interleaved({n: batched(c, count) for n, c in calls.items()}, seconds=seconds, min_rounds=15)
        us = {n: min(t) / count * 1e6 for n, t in times.items()}
        result[name] = {"us": {n: round(x, 2) for n, x in us.items()}, "ratio": round(us["detattn"] / us["sdpa"], 2)}
        print(
            f"overhead {name:21} detattn {us['detattn']:6.2f} us  sdpa {us['sdpa']:6.2f} us  "
            f"x{us['detattn'] / us['sdpa']:.2f}"
        )
    torch.set_num_threads(threads)
    return result


def main_gpu(args: argparse.Namespace) -> int:
    reason = gpu.gate()
    if reason is not None:
        print(f"no speed is reported: {reason}", file=sys.stderr)
        return 1
    name = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")
    output = args.output or RESULTS / f"{name}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    for kind in args.kinds.split(","):
        rows = [r for r in rows if r["kind"] != kind] + list(gpu.rows(kind, args.rounds))
        document = {
            "what": f"medians of {args.rounds} interleaved rounds; rested: 20 ms bursts after 60 ms rests, unrested: "
            "40 ms bursts back to back; decode: microseconds a call in a CUDA graph of ten; backward counts 2.5x the "
            "forward's FLOPs; overhead: best of 15",
            "provenance": provenance(),
            "rows": rows,
        }
        output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"-> {output}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", default="512,1024,2048,4096", help="CPU: the sequence lengths")
    parser.add_argument("--seconds", type=float, default=4.0, help="CPU: per row")
    parser.add_argument("--kinds", default=",".join(gpu.KINDS), help="GPU: which rows; the others of the file stay")
    parser.add_argument("--rounds", type=int, default=5, help="GPU: per row")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if args.device == "cuda":
        return main_gpu(args)
    args.output = args.output or RESULTS / "cpu.json"
    reason = gate()
    if reason is not None:
        print(f"no speed is reported: {reason}", file=sys.stderr)
        return 1
    small = overhead(min(args.seconds, 3.0))
    rows = throughput([int(s) for s in args.lengths.split(",")], args.seconds)
    worst = {k: min(r["ratio_to_best_sdpa"] for r in rows if r["kind"] == k) for k in ("forward", "backward")}  # type: ignore[type-var]
    document = {
        "what": f"causal, batch 1, {HEADS_Q}/{HEADS_KV} heads, head dim {HEAD_DIM}; medians of interleaved calls; "
        "backward counts 2.5x the forward's FLOPs",
        "provenance": provenance(),
        "overhead": small,
        "throughput": rows,
        "worst_ratio_to_best_sdpa": worst,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"worst ratio to the faster SDPA: forward {worst['forward']}, backward {worst['backward']} -> {args.output}")
    return 0 if all(math.isfinite(x) for x in worst.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
