"""The invariance audit: any attention callable in, a report out.

One check a promise of ``detattn.contract.PROMISES``. A check compares bytes of ``out``, ``lse`` and gradients, and a
planted fault goes through the same comparison: where it is not found, the check reports no power instead of a pass.
"""

from __future__ import annotations

from .checks import CHECKS
from .engine import audit
from .report import CheckResult, Evidence, Report, markdown_table
from .targets import Target

__all__ = ["CheckResult", "Evidence", "Report", "Target", "audit", "checks_markdown"]


def checks_markdown() -> str:
    """The checks as a markdown table, from the code that runs them."""
    rows = (
        (
            f"`{c.id}`",
            c.text,
            "out, lse, gradients" if c.gradients else "out, lse",
            c.control,
            c.requirements or "nothing more",
        )
        for c in CHECKS.values()
    )
    return markdown_table(("check", "what is compared", "of", "control: the planted fault", "needs"), rows)
