"""Runs checks on a target, each with its control, and writes down what they found."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from .. import _version, contract
from . import execution
from .bits import Difference, compare
from .cases import LONG
from .checks import CHECKS, Check
from .faulty import control
from .probe import Probed, probe
from .report import CheckResult, Evidence, Report
from .runner import Runner, in_words
from .targets import Attention, Target

Progress = Callable[[int, int, str], None]
"""Called as ``progress(checks done, checks in all, id of the next one)``."""


@dataclass
class _Tally:
    """One tensor's comparisons so far."""

    compared: int = 0
    differing: int = 0
    cases: int = 0
    differing_cases: int = 0
    max_ulp: int | None = None
    first: Difference | None = None
    first_case: str | None = None

    def add(self, case: str, elements: int, difference: Difference | None) -> None:
        self.compared += elements
        self.cases += 1
        if difference is None:
            return
        self.differing += difference.count
        self.differing_cases += 1
        if difference.max_ulp is not None:
            self.max_ulp = max(self.max_ulp or 0, difference.max_ulp)
        if self.first is None:
            self.first, self.first_case = difference, case

    def evidence(self, tensor: str) -> Evidence:
        first = self.first
        return Evidence(
            tensor,
            self.compared,
            self.differing,
            self.cases,
            self.differing_cases,
            self.max_ulp,
            self.first_case,
            first.index if first else None,
            f"{first.expected:.9g}" if first else None,
            f"{first.got:.9g}" if first else None,
        )


def compare_all(check: Check, runner: Runner, until: Iterable[str] | None = None) -> tuple[int, dict[str, _Tally]]:
    """Runs the check's cases; with ``until``, stops once each of those tensors has differed."""
    tallies: dict[str, _Tally] = {}
    cases = 0
    waiting = None if until is None else set(until)
    for pair in check.body(runner):
        cases += 1
        for tensor in pair.expected.keys() & pair.got.keys():
            a, b = pair.expected[tensor], pair.got[tensor]
            difference = compare(a, b)
            tallies.setdefault(tensor, _Tally()).add(pair.case, a.numel(), difference)
            if waiting is not None and difference is not None:
                waiting.discard(tensor)
        if waiting is not None and not waiting:
            break
    return cases, tallies


_ORDER = ("out", "lse", "dq", "dk", "dv", "dsinks")


def run_check(check: Check, runner: Runner, probed: Probed) -> CheckResult:
    """One check of one target: its needs, its cases, and where nothing differs its control."""
    started = time.perf_counter()

    def result(status: str, note: str = "", **more: object) -> CheckResult:
        seconds = time.perf_counter() - started
        return CheckResult(check.id, status, note, seconds=round(seconds, 2), **more)  # type: ignore[arg-type]

    target = runner.target
    for feature in check.needs:
        if not target.offers(feature):
            return result("not applicable", target.lacks[feature])
    if check.needs_one_of and not any(map(target.offers, check.needs_one_of)):
        return result("not applicable", "; ".join(target.lacks[f] for f in check.needs_one_of))
    for feature, wrong in probed.broken.items():
        if feature != "backward" or check.gradients:
            return result("error", f"{feature}: {wrong}")
    gradients = check.gradients and runner.backward
    mine = replace(runner, backward=gradients)
    try:
        cases, tallies = compare_all(check, mine)
    except Exception as error:
        return result("error", f"the target raised {in_words(error)}")
    notes = []
    if check.gradients and not gradients:
        notes.append("no gradients: " + target.lacks.get("backward", "not asked for"))
    if check.id == "execution":
        missing = target.lacks.get("compile") or execution.compiler_missing(runner.device)
        notes += [f"no torch.compile: {missing}"] if missing else []
        if runner.device.type == "cuda" and not target.offers("graph"):
            notes.append(f"no graph replay: {target.lacks['graph']}")
    note = "; ".join(notes)
    evidence = tuple(tallies[name].evidence(name) for name in _ORDER if name in tallies)
    if any(e.differing for e in evidence):
        return result("violated", note, cases=cases, tensors=evidence)
    planted = control(check.id, like=target, with_lse="lse" in tallies)
    try:
        _, moved = compare_all(check, replace(mine, target=planted), until=tallies)
    except Exception as error:
        return result("error", f"the control raised {in_words(error)}")
    found = tuple(name for name in _ORDER if name in moved and moved[name].differing)
    more = {"cases": cases, "tensors": evidence, "control": found}
    unseen = [e.tensor for e in evidence if e.tensor not in found]
    if unseen or not evidence:
        where = ", ".join(unseen) or "any tensor"
        return result("no power", f"the control ({check.control}) went unnoticed in {where}", **more)
    return result("holds", note, **more)


def audit(
    fn: Attention | Target,
    *,
    checks: Iterable[str] | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    backward: bool | None = None,
    seed: int = 0,
    long: int = LONG,
    progress: Progress | None = None,
) -> Report:
    """Checks an attention function for each promise of ``detattn.contract.PROMISES``, byte for byte.

    Args:
        fn: ``fn(q, k, v, causal=..., scale=...) -> out | (out, lse)`` with q ``[B, Hq, Sq, D]``, k, v
            ``[B, Hkv, Skv, D]``; more is tried where its parameter names offer more (see ``Target``). Or a ``Target``.
        checks: the ids to run, in the order of the promises; all where None.
        device: CPU where None.
        dtype: bfloat16 where None.
        backward: whether gradients are compared; None: where the result requires grad.
        seed: of the random inputs.
        long: keys of the longest sequences that are prefilled; with fewer than 2k an audit says less.
        progress: called before each check and once at the end.

    Returns:
        The report; ``print`` it, or read ``exit_code``, ``results``, ``to_dict()``. What the target raises in a check
        stands there as that check's error.

    Raises:
        ValueError: an unknown check, or ``backward=True`` for a target without gradients.
        TypeError: ``fn`` cannot be called like that.

    Example:
        >>> import torch
        >>> from detattn.audit import audit
        >>> def mine(q, k, v, causal, scale):
        ...     s = (q @ k.mT) * scale
        ...     if causal:
        ...         hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        ...         s = s.masked_fill(hidden, -torch.inf)
        ...     return s.softmax(-1) @ v
        >>> audit(Target.of(mine, lacks={"grouped": "not written yet"}), checks=["decode"])["decode"].status
        'violated'
    """
    chosen = select(checks)
    target = fn if isinstance(fn, Target) else Target.of(fn)
    where = torch.device(device or "cpu")
    with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
        return _audit(target, chosen, where, dtype or torch.bfloat16, backward, seed, long, progress)


def _audit(
    target: Target,
    chosen: list[Check],
    where: torch.device,
    dtype: torch.dtype,
    backward: bool | None,
    seed: int,
    long: int,
    progress: Progress | None,
) -> Report:
    runner = Runner(target, where, dtype, False, seed, long)
    probed = probe(runner)
    target = replace(target, lacks={**target.lacks, **probed.lacks})
    if backward and not target.offers("backward"):
        raise ValueError(f"gradients of {target.name} cannot be audited: {target.lacks['backward']}")
    runner = replace(runner, target=target, backward=target.offers("backward") if backward is None else backward)
    results = []
    for done, check in enumerate(chosen):
        if progress is not None:
            progress(done, len(chosen), check.id)
        results.append(run_check(check, runner, probed))
    if progress is not None:
        progress(len(chosen), len(chosen), "")
    return Report(target.name, _about(where, runner.dtype, seed), tuple(results))


def select(ids: Iterable[str] | None) -> list[Check]:
    """The checks of those ids in the order of the promises; every check where None.

    Raises:
        ValueError: an id that no check has; the message lists those there are.
    """
    if ids is None:
        return [CHECKS[p.id] for p in contract.PROMISES]
    wanted = [ids] if isinstance(ids, str) else list(ids)
    unknown = [id for id in wanted if id not in CHECKS]
    if unknown or not wanted:
        raise ValueError(f"no check {', '.join(unknown) or 'was named'}; there are {', '.join(CHECKS)}")
    return [CHECKS[p.id] for p in contract.PROMISES if p.id in wanted]


def device_name(device: torch.device) -> str:
    """What hardware the device is, as its vendor calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _about(device: torch.device, dtype: torch.dtype, seed: int) -> dict[str, str]:
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return {
        "device": f"{device} ({device_name(device)}{threads})",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "detattn": f"{_version.__version__}, contract version {contract.VERSION}",
        "seed": str(seed),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
