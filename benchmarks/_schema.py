"""The schema of every file under ``benchmarks/results/``: arms with their samples, targets with their verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from fulltilt.records import Machine
from fulltilt.stats import compute_quantile_interval

CONFIDENCE = 0.95
N_RESAMPLES = 2000
Interval = tuple[float | None, float | None]
"""An end is None where nothing bounds it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One contestant's figure in one case, with all its samples."""

    case: str  # "step 10 ms"
    arm: str  # "fulltilt", "lightning"
    metric: str  # with its unit: "overhead_us_per_step"
    median: float
    ci95: Interval  # null at an end: so few repetitions do not bound the median there
    n: int  # independent repetitions: blocks, processes, runs; the clusters where samples come in such
    unit_of_replication: str  # "interleaved block of 64 steps"
    note: str | None = None  # settings of the arm, a link to the peer's documentation
    samples: tuple[float, ...] = ()
    clusters: tuple[str, ...] = ()  # what each sample belongs to, where samples of one thing are alike; n counts these


def build_arm(samples: Sequence[float], *, clusters: Sequence[str] = (), **told: Any) -> Arm:
    """Build an arm from its samples: the median, and the interval of the median.

    Every sample is an independent repetition, or every cluster where these are named, one name a sample.

    Args:
        told: The other fields of the arm: ``case``, ``arm``, ``metric``, ``unit_of_replication``, ``note``.

    Raises:
        ValueError: no samples, one that is not finite, or not a cluster for each.
    """
    if not samples or not all(map(math.isfinite, samples)):
        raise ValueError(f"{told} needs finite samples, got {list(samples)}")
    return Arm(
        **told,
        median=statistics.median(samples),
        ci95=compute_bounds(samples, clusters=clusters),
        n=len(set(clusters) or samples),
        samples=tuple(samples),
        clusters=tuple(clusters),
    )


def compute_bounds(values: Sequence[float], quantile: float = 0.5, *, clusters: Sequence[str] = ()) -> Interval:
    """Return the 95 % interval of a quantile; None for an end that the values do not bound.

    The least value bounds a quantile from below only where hardly ever all values lie above it: the median takes 6
    values at either end, the 95th percentile 72 at its upper one. Where values come in clusters, whole clusters are
    drawn anew (a bootstrap), and the number of clusters is what bounds an end.

    Raises:
        ValueError: no values, one that is not finite, or not a cluster for each.
    """
    if clusters and len(clusters) != len(values):
        raise ValueError(f"{len(values)} values have {len(clusters)} clusters; name one for each value, or none")
    if clusters:
        (low, high), n = _resample_clusters(values, quantile, clusters), len(set(clusters))
    else:
        (low, high), n = compute_quantile_interval(values, quantile, CONFIDENCE), len(values)
    tail = 0.5 - CONFIDENCE / 2
    return low if (1 - quantile) ** n <= tail else None, high if quantile**n <= tail else None


def _resample_clusters(values: Sequence[float], quantile: float, clusters: Sequence[str]) -> tuple[float, float]:
    by_cluster: dict[str, list[float]] = defaultdict(list)
    for cluster, value in zip(clusters, values, strict=True):
        by_cluster[cluster].append(value)
    groups = [np.array(group) for group in by_cluster.values()]
    drawn = np.random.default_rng(0).integers(len(groups), size=(N_RESAMPLES, len(groups)))
    found = [np.quantile(np.concatenate([groups[i] for i in row]), quantile) for row in drawn]
    low, high = np.quantile(found, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return float(low), float(high)


def describe_interval(interval: Interval, spec: str = ".4g") -> str:
    """Write an interval: ``0.97 to 1.1``, ``0.97 to no bound``, or ``no interval``."""
    if interval == (None, None):
        return "no interval"
    return " to ".join("no bound" if end is None else format(end, spec) for end in interval)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A stated goal and what was measured: met or missed where the whole interval says so, else ``met`` is None."""

    name: str
    limit: float
    comparison: Literal["at most", "at least"]
    measured: float
    ci95: Interval | None  # None: counted, or without spread
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
    cpu_pressure_pct: float | None = None  # of the run's time in which any task of the machine waited for a core
    commit: str | None = None  # short hash of the code that ran; None where it is not known
    is_dirty: bool | None = None  # the code differed from that commit
    version: int = 1


def judge(
    name: str,
    measured: float,
    ci95: Interval | None,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    note: str | None = None,
) -> Target:
    """Hold a figure against one of the two limits: met or missed only where the whole interval says so, else undecided.

    An end that nothing bounds decides nothing; a figure without an interval decides by itself.

    Raises:
        ValueError: the figure is not finite.
    """
    if not math.isfinite(measured):
        raise ValueError(f"{name}: measured {measured} cannot be held against a target")
    low, high = (measured, measured) if ci95 is None else ci95
    if at_least is None:
        limit, comparison = at_most, "at most"
        meets, misses = high is not None and high <= limit, low is not None and low > limit
    else:
        limit, comparison = at_least, "at least"
        meets, misses = low is not None and low >= limit, high is not None and high < limit
    met = True if meets else False if misses else None
    return Target(name=name, limit=limit, comparison=comparison, measured=measured, ci95=ci95, met=met, note=note)


def judge_median(name: str, samples: Sequence[float], **limit: Any) -> Target:
    """Hold the median of the samples against a target, by its interval; ``limit`` is as in ``judge``."""
    return judge(name, statistics.median(samples), compute_bounds(samples), **limit)
