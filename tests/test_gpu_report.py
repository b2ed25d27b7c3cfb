"""The committed outcome of the GPU suite belongs to the kernel sources of this commit, or says why it does not."""

from __future__ import annotations

import json
from pathlib import Path

import gpu_report
import pytest


def verdict(report: dict, sources: str) -> str | None:
    """Why the report does not cover these sources; None where it does."""
    stale = report.get("stale")
    if stale is not None:
        return None if stale["sources"] == sources and stale["reason"].strip() else "the stale marker is out of date"
    if report["sources"] != sources:
        return "the kernel sources changed after the GPU suite ran: run make test-gpu on a GPU machine and commit"
    if report["exit_code"] != 0 or report["audit_exit_code"] != 0:
        return "the GPU suite did not pass"
    for name in gpu_report.SUITE:
        count = report["files"].get(name)
        if count is None or count["failures"] or count["errors"] or count["tests"] <= count["skipped"]:
            return f"{name} did not pass on a GPU"
    return None


def test_report_covers_the_sources() -> None:
    report = json.loads(gpu_report.REPORT.read_text())
    assert verdict(report, gpu_report.sources_hash()) is None


PASSED = {"tests": 10, "failures": 0, "errors": 0, "skipped": 3}


@pytest.mark.parametrize(
    "change",
    [
        {"sources": "other"},
        {"exit_code": 1},
        {"audit_exit_code": 1},
        {"files": dict.fromkeys(gpu_report.SUITE[1:], PASSED)},
        {"files": dict.fromkeys(gpu_report.SUITE, PASSED | {"failures": 1})},
        {"files": dict.fromkeys(gpu_report.SUITE, PASSED | {"skipped": 10})},
        {"stale": {"sources": "other", "reason": "no GPU"}},
        {"stale": {"sources": "now", "reason": " "}},
    ],
)
def test_a_bad_report_is_found(change: dict) -> None:
    good = {
        "sources": "now",
        "exit_code": 0,
        "audit_exit_code": 0,
        "files": dict.fromkeys(gpu_report.SUITE, PASSED),
        "stale": None,
    }
    assert verdict(good, "now") is None
    assert verdict(good | change, "now") is not None


def test_outcomes_are_counted_by_file(tmp_path: Path) -> None:
    xml = tmp_path / "junit.xml"
    xml.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_op" name="a"/>'
        '<testcase classname="tests.test_op" name="b"><failure/></testcase>'
        '<testcase classname="tests.test_golden.TestGolden" name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    assert gpu_report.outcomes(xml) == {
        "test_op.py": {"tests": 2, "failures": 1, "errors": 0, "skipped": 0},
        "test_golden.py": {"tests": 1, "failures": 0, "errors": 0, "skipped": 1},
    }


def test_the_hash_sees_code_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cu"
    source.write_text("int a = 1;  // one\n")
    before = gpu_report.code_of(source)
    source.write_text("/* the first */ int a\n    = 1;\n")
    assert gpu_report.code_of(source) == before
    source.write_text("int a = 2;\n")
    assert gpu_report.code_of(source) != before


def test_the_hash_sees_every_kernel_file() -> None:
    names = {p.name for p in gpu_report.sources()}
    assert {p.name for p in (gpu_report.ROOT / "csrc" / "cuda").iterdir() if p.is_file()} <= names
    assert {"bindings.cpp", "contract.h", "mask.h", "params.h"} <= names
