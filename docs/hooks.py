"""Renders the tables that have their source in code: ``{{ name }}`` on a line of its own becomes the table."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "src"))

from detattn import contract  # noqa: E402


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([str(c) for c in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def promises() -> str:
    covers = {"forward": "out, lse", "backward": "gradients", "both": "out, lse, gradients"}
    return table(
        ("id", "may change freely", "bits that stay"),
        ((f"`{p.id}`", p.text, covers[p.scope]) for p in contract.PROMISES),
    )


def constants() -> str:
    spans = []
    for end, keys in contract.CHUNK_SCHEDULE:
        spans.append(f"{keys} keys " + ("beyond" if end == contract.UNBOUNDED else f"below key {end}"))
    wide = f"{contract.BLOCK_KEYS} keys; {contract.BLOCK_KEYS_WIDE} for head dims above {contract.BLOCK_WIDE_ABOVE}"
    rows = [
        ("contract version", contract.VERSION),
        ("block", wide),
        ("chunk", ", ".join(spans)),
        ("lazy reference threshold", f"2^{contract.LAZY_THRESHOLD:g}"),
        ("largest head dim", contract.MAX_HEAD_DIM),
    ]
    return table(("constant", "value"), rows)


def _results(name: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return loaded


def _conditions(document: dict) -> str:
    p = document["provenance"]
    return (
        f"{document['what']}. {p['cpu']}, {p['cpu_capability']}, {p['threads']} threads, torch {p['torch']}, "
        f"contract version {p['contract_version']}, commit {p['commit']}, {p['date']}."
    )


def cpu_throughput() -> str:
    document = _results("cpu.json")
    rows = []
    for r in document["throughput"]:
        best = max(v for k, v in r["gflops"].items() if k != "detattn")
        rows.append(
            (r["kind"], r["dtype"], r["length"], r["gflops"]["detattn"], best, f"{r['ratio_to_best_sdpa']:.2f}")
        )
    head = ("pass", "dtype", "length", "detattn GFLOP/s", "faster SDPA GFLOP/s", "ratio")
    return table(head, rows) + "\n\n" + _conditions(document)


def cpu_overhead() -> str:
    document = _results("cpu.json")
    rows = [
        (name.replace("_", " "), r["us"]["detattn"], r["us"]["sdpa"], f"{r['ratio']:.2f}")
        for name, r in document["overhead"].items()
    ]
    return table(("call", "detattn us", "SDPA us", "ratio"), rows)


def _gpu_rows(kind: str) -> list[dict]:
    rows: list[dict] = [r for r in _results("h200.json")["rows"] if r["kind"] == kind]
    return rows


def _by_mode(rows: list[dict]) -> list[dict[str, dict]]:
    """Rows of one shape, rested beside unrested."""
    shapes: dict[tuple, dict[str, dict]] = {}
    for r in rows:
        key = tuple(r[k] for k in ("batch", "queries", "keys", "mask", "head_dim", "heads", "dtype"))
        shapes.setdefault(key, {})[r["mode"]] = r
    return list(shapes.values())


def _shape(r: dict) -> tuple[object, ...]:
    length = r["queries"] if r["queries"] == r["keys"] else f"{r['queries']} x {r['keys']}"
    return (
        f"{r['mask']} {length}",
        r["batch"],
        r["head_dim"],
        r["heads"],
        {"bfloat16": "bf16", "float16": "fp16"}[r["dtype"]],
    )


SHAPE = ("shape", "batch", "head dim", "heads", "dtype")


def _ratio(r: dict, peer: str) -> str:
    if r.get(peer) is None:
        return ""
    return f"{r[peer] / r['detattn'] if r['unit'] == 'us' else r['detattn'] / r[peer]:.2f}"


def gpu_prefill() -> str:
    """Prefill rows beside cuDNN, or flash where cuDNN has no such call."""
    lines = []
    for modes in _by_mode(_gpu_rows("prefill")):
        cells: list[object] = []
        for mode in ("rested", "unrested"):
            r = modes[mode]
            peer = "cudnn" if "cudnn" in r else "flash"
            cells += [r["detattn"], f"{r[peer]}" + (" (flash)" if peer == "flash" else ""), _ratio(r, peer)]
        lines.append((*_shape(modes["rested"]), *cells))
    return table((*SHAPE, "rested", "cuDNN", "ratio", "unrested", "cuDNN", "ratio"), lines)


def gpu_varlen() -> str:
    lines = []
    for r in _gpu_rows("varlen"):
        lengths = r["lengths"]
        name = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else ", ".join(map(str, lengths))
        lines.append((name, r["mask"], r["detattn"], r["dense_4x4096"], f"{r['ratio']:.2f}"))
    return table(("lengths", "mask", "packed", "dense 4 x 4096", "ratio"), lines)


def gpu_decode() -> str:
    lines = []
    for r in _gpu_rows("decode"):
        kind = f"pages of {r['page_size']}" if r["page_size"] else "dense"
        lines.append(
            (r["batch"], r["keys"], r["head_dim"], r["heads"], kind, r["detattn"], r["cudnn"], _ratio(r, "cudnn"))
        )
    return table(("batch", "context", "head dim", "heads", "cache", "detattn us", "cuDNN us", "ratio"), lines)


def gpu_backward() -> str:
    lines = []
    for modes in _by_mode(_gpu_rows("backward")):
        cells: list[object] = []
        for mode in ("rested", "unrested"):
            r = modes[mode]
            for peer in ("cudnn_deterministic", "cudnn"):
                cells += [f"{r.get(peer, '')} ({_ratio(r, peer)})"]
            cells.insert(-2, r["detattn"])
        r = modes["rested"]
        lines.append((*_shape(r), *cells, r["peak_mib"]))
    peers = ("cuDNN deterministic (ratio)", "cuDNN (ratio)")
    return table((*SHAPE, "rested", *peers, "unrested", *peers, "peak MiB"), lines)


def gpu_overhead() -> str:
    lines = [
        ("with grad" if r["grad"] else "no grad", r["detattn"], r["sdpa"], f"{r['detattn'] / r['sdpa']:.2f}")
        for r in _gpu_rows("overhead")
    ]
    return table(("forward call", "detattn us", "SDPA us", "ratio"), lines)


def gpu_conditions() -> str:
    document = _results("h200.json")
    p = document["provenance"]
    return (
        f"{p['gpu']}, torch {p['torch']}, CUDA {p['cuda']}, contract version {p['contract_version']}, {p['date']}: "
        f"{document['what']}."
    )


def chunk_schedules() -> str:
    document = _results("h200_chunk_schedules.json")
    lines = [
        (name, *(" / ".join(map(str, values)) for values in by_shape.values()))
        for name, by_shape in document["schedules"].items()
    ]
    heads = next(iter(document["schedules"].values()))
    return table(("chunks", *heads), lines) + f"\n\n{document['what']}."


def _audit(name: str) -> str:
    document = _results(f"audit_cpu_{name}.json")
    about = ", ".join(f"{k} {v}" for k, v in document["about"].items())
    rows = ((f"`{c['id']}`", c["status"], c["evidence"].replace("|", "\\|")) for c in document["checks"])
    checks = table(("check", "status", "evidence"), rows)
    return f"`{document['target']}`: {about}\n\n{checks}\n\n**{document['verdict']}**"


def audit_sdpa_float32() -> str:
    return _audit("sdpa_float32")


def audit_sdpa_bfloat16() -> str:
    return _audit("sdpa_bfloat16")


def audit_checks() -> str:
    from detattn.audit import checks_markdown

    return checks_markdown()


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        promises,
        constants,
        cpu_throughput,
        cpu_overhead,
        gpu_prefill,
        gpu_varlen,
        gpu_decode,
        gpu_backward,
        gpu_overhead,
        gpu_conditions,
        chunk_schedules,
        audit_checks,
        audit_sdpa_float32,
        audit_sdpa_bfloat16,
    )
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs calls this with each page. An unknown name fails the build."""
    return re.sub(r"^\{\{ (\w+) \}\}$", lambda m: TABLES[m.group(1)](), markdown, flags=re.MULTILINE)
