"""Runs the suite on this machine's GPU and records the outcome next to a hash of what was tested.

``make test-gpu`` runs this and rewrites ``tests/gpu_report.json``. Continuous integration has no GPU, so
``tests/test_gpu_report.py`` turns red there when the kernel sources are no longer the ones of the report. Where no GPU
can be had, ``python tests/gpu_report.py --mark-stale "reason"`` says so in the report instead of hiding it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "tests" / "gpu_report.json"
SUITE = (
    "test_accuracy.py",
    "test_invariance.py",
    "test_op.py",
    "test_errors.py",
    "test_contract.py",
    "test_golden.py",
    "test_serving.py",
    "test_known_faults.py",
    "test_known_gradient_faults.py",
    "test_scale.py",
)
"""The files whose tests follow ``--device``."""


def sources() -> list[Path]:
    """What a GPU result depends on: everything nvcc compiles, and the bindings that launch it."""
    shared = (ROOT / "csrc" / name for name in ("bindings.cpp", "contract.h", "mask.h", "params.h"))
    return sorted([*(ROOT / "csrc" / "cuda").glob("*"), *shared])


def code_of(path: Path) -> str:
    """What the compiler sees of a source: comments and layout may change without another run."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", "", text)


def sources_hash() -> str:
    digest = hashlib.sha256()
    for path in sources():
        digest.update(f"{path.name}\0{code_of(path)}\0".encode())
    return digest.hexdigest()


def outcomes(xml: Path) -> dict[str, dict[str, int]]:
    """Counts by test file."""
    files: dict[str, dict[str, int]] = {}
    for case in ET.parse(xml).getroot().iter("testcase") if xml.exists() else ():
        name = next(part for part in case.get("classname", "").split(".") if part.startswith("test_")) + ".py"
        count = files.setdefault(name, dict.fromkeys(("tests", "failures", "errors", "skipped"), 0))
        count["tests"] += 1
        for kind, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            count[kind] += case.find(tag) is not None
    return files


def run_suite(names: list[str], extra: list[str]) -> dict[str, object]:
    import torch

    from detattn import contract

    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "junit.xml"
        files = [f"tests/{name}" for name in names]
        command = [sys.executable, "-m", "pytest", *files, "--device", "cuda", f"--junit-xml={xml}", *extra]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        counts = outcomes(xml)
    audit = subprocess.run([sys.executable, "-m", "detattn.audit", "--device", "cuda"], cwd=ROOT, check=False)
    smi = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(smi, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "sources": sources_hash(),
        "exit_code": code,
        "audit_exit_code": audit.returncode,
        "files": counts,
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "contract_version": contract.VERSION,
        "date": datetime.date.today().isoformat(),
        "stale": None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mark-stale", metavar="REASON", help="the sources moved on and no GPU could be had")
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument(
        "--files", default=",".join(SUITE), help="part of the suite; files run before on the same sources stay"
    )
    args, extra = parser.parse_known_args()
    if args.mark_stale:
        report = json.loads(REPORT.read_text()) if REPORT.exists() else {"sources": None}
        report["stale"] = {"sources": sources_hash(), "reason": args.mark_stale}
        code = 0
    else:
        before = json.loads(REPORT.read_text()) if REPORT.exists() else {}
        report = run_suite(args.files.split(","), extra)
        if before.get("sources") == report["sources"]:
            report["files"] = before["files"] | report["files"]
        code = int(report["exit_code"])
    args.report.write_text(json.dumps(report, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
