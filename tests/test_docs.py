"""What the documents show, runs; what they quote from a results file, stands in it."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

import detattn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SNIPPETS = [
    pytest.param(code, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, code in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]
MODULES = ("detattn.api", "detattn.contract", "detattn.backends", "detattn.backends.reference", "detattn.harness")


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code: str) -> None:
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name: str) -> None:
    module = importlib.import_module(name)
    import torch

    found = doctest.testmod(module, extraglobs={"torch": torch}, optionflags=doctest.ELLIPSIS)
    assert found.attempted > 0
    assert found.failed == 0


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)


def test_files_that_contributing_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    roots = (ROOT, ROOT / "src" / "detattn")
    for name in set(re.findall(r"`([\w./]+\.(?:py|h|md|cpp|json)|[\w/]+/)`", text)):
        assert any((r / name).exists() for r in roots), name


def readme_table() -> str:
    """The audit table of the README, from the reports in benchmarks/results."""
    columns = [("detattn", "bfloat16"), ("sdpa", "bfloat16"), ("sdpa", "float32")]
    reports = []
    for target, dtype in columns:
        report = json.loads((ROOT / "benchmarks" / "results" / f"audit_cpu_{target}_{dtype}.json").read_text())
        reports.append({check["id"]: check for check in report["checks"]})
    head = ["| promise | detattn bf16 | SDPA bf16 | SDPA fp32 |", "| --- | --- | --- | --- |"]
    rows = [[p.id, *(verdict(r[p.id]) for r in reports)] for p in detattn.contract.PROMISES]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])


def verdict(check: dict) -> str:
    if check["status"] != "violated":
        return check["status"]
    worst = max(check["tensors"], key=lambda t: t["differing_cases"])
    return f"**violated** in {worst['differing_cases']} of {worst['cases']} cases"


def test_the_table_of_the_readme_is_the_one_of_the_reports() -> None:
    assert readme_table() in (ROOT / "README.md").read_text()
