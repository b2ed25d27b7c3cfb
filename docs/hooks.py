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


def gpu_prefill() -> str:
    """Prefill rows as rested/unrested pairs beside cuDNN."""
    rows: dict[str, dict[str, dict]] = {}
    for r in _results("h200_forward.json")["rows"]:
        if r["unit"] == "TFLOP/s" and "cudnn" in r and r["shape"].count(",") >= 6:
            rows.setdefault(r["shape"], {})[r["mode"]] = r
    table_rows = []
    for shape, modes in rows.items():
        mask, sq, sk, batch, dim, heads, kv, *kind = shape.split(",")
        name = f"{'causal' if mask == 'c' else 'full'} {sq}" + ("" if sq == sk else f" x {sk}")
        cells = []
        for mode in ("rested", "unrested"):
            r = modes.get(mode)
            cells += [r["ours"], r["cudnn"], f"{r['ours'] / r['cudnn']:.2f}"] if r else ["", "", ""]
        table_rows.append((name, batch, dim, f"{heads}/{kv}", f"fp{kind[0][1:]}" if kind else "bf16", *cells))
    head = ("shape", "batch", "head dim", "heads", "dtype", "rested", "cuDNN", "ratio", "unrested", "cuDNN", "ratio")
    return table(head, table_rows)


def gpu_decode() -> str:
    rows = []
    for r in _results("h200_forward.json")["rows"]:
        if r["unit"] == "us" and "cudnn" in r:
            batch, length, dim, heads, kv, *page = r["shape"].split(",")
            kind = f"pages of {page[0]}" if page else "dense"
            rows.append(
                (batch, length, dim, f"{heads}/{kv}", kind, r["ours"], r["cudnn"], f"{r['ours'] / r['cudnn']:.2f}")
            )
    return table(("batch", "context", "head dim", "heads", "cache", "detattn us", "cuDNN us", "ratio"), rows)


def audit_checks() -> str:
    from detattn.audit import checks_markdown

    return checks_markdown()


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (promises, constants, cpu_throughput, cpu_overhead, gpu_prefill, gpu_decode, audit_checks)
}


def on_page_markdown(markdown: str, **_: object) -> str:
    """MkDocs calls this with each page. An unknown name fails the build."""
    return re.sub(r"^\{\{ (\w+) \}\}$", lambda m: TABLES[m.group(1)](), markdown, flags=re.MULTILINE)
