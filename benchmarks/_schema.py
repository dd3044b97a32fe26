"""The one result schema: what every file under ``benchmarks/results/`` holds.

A claim is a figure with its interval, the number of independent repetitions behind it, what it was compared with in
the same run, and the target it was held against.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

from fulltilt.records import Machine
from fulltilt.stats import compute_quantile_interval


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One contestant's figure in one case."""

    case: str  # "step 10 ms"
    arm: str  # "fulltilt", "lightning"
    metric: str  # with its unit: "overhead_us_per_step"
    median: float
    ci95: tuple[float, float]
    n: int  # independent repetitions: blocks, processes, runs
    unit_of_replication: str  # "interleaved block of 64 steps"
    note: str | None = None  # settings of the arm, a link to the peer's documentation
    samples: tuple[float, ...] = ()


def build_arm(
    samples: Sequence[float], *, case: str, arm: str, metric: str, unit_of_replication: str, note: str | None = None
) -> Arm:
    """An arm from its independent repetitions: the median, and the interval of the median.

    Raises:
        ValueError: no samples, or one that is not finite.
    """
    if not samples or not all(map(math.isfinite, samples)):
        raise ValueError(f"{case}, {arm}: {metric} needs finite samples, got {list(samples)}")
    return Arm(
        case=case,
        arm=arm,
        metric=metric,
        median=statistics.median(samples),
        ci95=compute_quantile_interval(samples, 0.5),
        n=len(samples),
        unit_of_replication=unit_of_replication,
        note=note,
        samples=tuple(samples),
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A stated goal and what was measured. ``met`` is None where the interval does not decide."""

    name: str
    limit: float
    comparison: Literal["at most", "at least"]
    measured: float
    ci95: tuple[float, float] | None
    met: bool | None
    note: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkResult:
    name: str
    claim: str  # one sentence that the figures below support or refute
    command: str  # what to type to get this file again
    date: str  # ISO day
    device: str
    machine: Machine
    versions: dict[str, str]
    seconds: float
    arms: tuple[Arm, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()
    cpu_pressure_pct: float | None = (
        None  # share of the run in which some task waited for a core: the run's own, others'
    )
    version: int = 1


def judge(
    name: str,
    measured: float,
    ci95: tuple[float, float] | None,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str | None = None,
) -> Target:
    """Hold a figure against its target: met or missed only where the whole interval says so.

    Raises:
        ValueError: no limit or two, or a figure that is not finite.
    """
    limit = at_most if at_most is not None else at_least
    if limit is None or (at_most is not None and at_least is not None):
        raise ValueError(f"{name}: give one of at_most and at_least")
    if not math.isfinite(measured):
        raise ValueError(f"{name}: measured {measured} cannot be held against a target")
    low, high = ci95 or (measured, measured)
    if at_most is not None:
        met = True if high <= limit else False if low > limit else None
    else:
        met = True if low >= limit else False if high < limit else None
    comparison: Literal["at most", "at least"] = "at most" if at_most is not None else "at least"
    return Target(name=name, limit=limit, comparison=comparison, measured=measured, ci95=ci95, met=met, note=note)
