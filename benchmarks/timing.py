"""Interleaved timing: every variant in every round, in a shuffled order, so that a drifting clock hits all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

Variant = Callable[[], object]


def interleaved(variants: dict[str, Variant], *, seconds: float, min_rounds: int = 5) -> dict[str, list[float]]:
    """Seconds of each call, per variant. Each variant runs once unmeasured first."""
    for run in variants.values():
        run()
    rng = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in variants}
    started = time.perf_counter()
    rounds = 0
    while rounds < min_rounds or time.perf_counter() - started < seconds:
        order = list(variants)
        rng.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            variants[name]()
            times[name].append(time.perf_counter() - begin)
        rounds += 1
    return times


def median(times: list[float]) -> float:
    return statistics.median(times)


def batched(call: Variant, count: int) -> Variant:
    """``count`` calls as one, for calls too short for the clock."""

    def run() -> None:
        for _ in range(count):
            call()

    return run
