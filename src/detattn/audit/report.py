"""What an audit found, as objects, text, markdown and JSON."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["holds", "violated", "no power", "not applicable", "error"]

STATUSES: dict[Status, str] = {
    "holds": "every byte compared is equal, and the same comparison found the control's fault in every tensor",
    "violated": "bytes differ; the evidence says how many, by how much, and where first",
    "no power": "the planted fault went unnoticed, so equal bytes would prove nothing",
    "not applicable": "the target lacks what the promise is about; the reason is given",
    "error": "the target raised, or is not attention in the convention of the call",
}

SCHEMA = 1
"""Raised when a field of the JSON changes its meaning or goes away."""


@dataclass(frozen=True)
class Evidence:
    """One tensor over all cases of a check; ``first_*`` describe the first case that differs."""

    tensor: str
    compared: int
    differing: int
    cases: int
    differing_cases: int
    max_ulp: int | None = None
    first_case: str | None = None
    first_index: tuple[int, ...] | None = None
    expected: str | None = None
    got: str | None = None

    def __str__(self) -> str:
        if not self.differing:
            return f"{self.tensor}: {_count(self.compared)} elements equal"
        ulp = "NaN" if self.max_ulp is None else f"max {self.max_ulp} ulp"
        index = ", ".join(map(str, self.first_index or ()))
        return (
            f"{self.tensor}: {self.differing} of {self.compared} differ ({self.differing_cases} of {self.cases} cases, "
            f"{ulp}); first [{index}] {self.expected} -> {self.got} in {self.first_case}"
        )


@dataclass(frozen=True)
class CheckResult:
    """One check's verdict. ``note`` is the reason, or what was left out; ``control`` the tensors its control moved."""

    id: str
    status: Status
    note: str = ""
    cases: int = 0
    tensors: tuple[Evidence, ...] = ()
    control: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def evidence(self) -> str:
        """One line for a table."""
        note = f" ({self.note})" if self.note else ""
        if self.status == "holds":
            names = ", ".join(e.tensor for e in self.tensors)
            total = sum(e.compared for e in self.tensors)
            return f"{self.cases} cases, {_count(total)} elements of {names}{note}"
        if self.status == "violated":
            moved = [e for e in self.tensors if e.differing]
            more = f"; also {', '.join(e.tensor for e in moved[1:])}" if len(moved) > 1 else ""
            return f"{moved[0]}{more}{note}"
        return self.note


@dataclass(frozen=True)
class Report:
    """An audit: where it ran (``about``) and one result a check."""

    target: str
    about: dict[str, str]
    results: tuple[CheckResult, ...] = field(default=())

    def __getitem__(self, id: str) -> CheckResult:
        """The result of that check. Raises ``KeyError``."""
        for result in self.results:
            if result.id == id:
                return result
        raise KeyError(id)

    @property
    def counts(self) -> dict[Status, int]:
        """How many checks ended in each status."""
        seen = Counter(r.status for r in self.results)
        return {status: seen[status] for status in STATUSES}

    @property
    def exit_code(self) -> int:
        """0: every applicable check holds. 1: a promise is violated. 2: something could not be told."""
        counts = self.counts
        if counts["violated"]:
            return 1
        return 2 if counts["error"] or counts["no power"] or not counts["holds"] else 0

    @property
    def verdict(self) -> str:
        counts = self.counts
        numbers = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
        if counts["violated"]:
            broken = ", ".join(r.id for r in self.results if r.status == "violated")
            return f"VIOLATED: {broken} ({numbers})"
        if self.exit_code == 2:
            return f"COULD NOT TELL ({numbers or 'no checks'})"
        return f"HOLDS ({numbers})"

    def __str__(self) -> str:
        wide = max((len(r.id) for r in self.results), default=5)
        lines = [f"{name + ':':<18}{value}" for name, value in {"target": self.target, **self.about}.items()]
        lines += ["", f"{'check':<{wide}}  {'status':<14}  evidence"]
        for r in self.results:
            head, *rest = textwrap.wrap(r.evidence, 120 - wide - 18, break_on_hyphens=False) or [""]
            lines.append(f"{r.id:<{wide}}  {r.status:<14}  {head}".rstrip())
            lines += [" " * (wide + 18) + part for part in rest]
        return "\n".join([*lines, "", self.verdict])

    def markdown(self) -> str:
        """The same as tables for a document."""
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        rows = ((f"`{r.id}`", r.status, r.evidence) for r in self.results)
        table = markdown_table(("check", "status", "evidence"), rows)
        return f"`{self.target}`: {about}\n\n{table}\n\n**{self.verdict}**"

    def to_dict(self) -> dict[str, Any]:
        """Everything, for ``json.dump``. ``schema`` names the layout."""
        return {
            "schema": SCHEMA,
            "target": self.target,
            "about": dict(self.about),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "counts": dict(self.counts),
            "checks": [{**asdict(r), "evidence": r.evidence} for r in self.results],
        }


def markdown_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table; bars inside cells are escaped."""
    names = list(head)
    lines = [names, ["---"] * len(names), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _count(n: int) -> str:
    for size, unit in ((10**6, "M"), (10**3, "k")):
        if n >= size:
            return f"{n / size:.1f}{unit}"
    return str(n)
