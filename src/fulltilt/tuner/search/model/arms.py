"""Predict the time of an arm, one choice of a group of levers, from those that were measured; of loaders by workers."""

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import Plan

LONE_EFFICIENCY = 0.85  # of a worker, where none was measured
LONE_EXPONENT = 0.8  # of the batch, where one point is all there is: a part of a step does not grow with the batch

Arm = tuple[tuple[str, Any], ...]

_REMEMBERED = 16_384  # plans: a large grid is asked for its arms at every whole run
_COUNTED_APART = ("batch_size", "num_workers", "accumulate")


class Curve:
    """Interpolates seconds over the batch size.

    At a point the figure itself; between two a straight line in logarithms; above the last the line through the last
    two, below the first the line through the first two, neither with a negative constant part nor a negative slope.

    Args:
        points: Batch size → seconds, at least one.
    """

    def __init__(self, points: Mapping[int, float]):
        self.batches = sorted(points)
        self._seconds = [points[batch] for batch in self.batches]

    def __call__(self, batch: int) -> float:
        batches, seconds = self.batches, self._seconds
        if len(batches) == 1:
            return seconds[0] * (batch / batches[0]) ** LONE_EXPONENT
        if batch <= batches[0]:
            return self._read_line(0, 1, batch)
        if batch >= batches[-1]:
            return self._read_line(-2, -1, batch)
        right = bisect.bisect_left(batches, batch)
        return interpolate(batch, (batches[right - 1], batches[right]), (seconds[right - 1], seconds[right]))

    def _read_line(self, left: int, right: int, batch: int) -> float:
        span = self.batches[right] - self.batches[left]
        slope = (self._seconds[right] - self._seconds[left]) / span
        nearest = right if batch >= self.batches[right] else left
        known_s, known = self._seconds[nearest], self.batches[nearest]
        slope = min(max(slope, 0.0), known_s / known)
        return known_s + slope * (batch - known)


def interpolate(at: float, xs: tuple[float, float], ys: tuple[float, float]) -> float:
    """Read the straight line in logarithms through two points."""
    share = math.log(at / xs[0]) / math.log(xs[1] / xs[0])
    return ys[0] * (ys[1] / ys[0]) ** share


@functools.lru_cache(maxsize=_REMEMBERED)
def device_arm(plan: Plan) -> Arm:
    """Return the levers that change what the device computes."""
    return _select(plan, of_loader=False)


@functools.lru_cache(maxsize=_REMEMBERED)
def feed_arm(plan: Plan) -> Arm:
    """Return the levers that change how batches are fetched, without batch size and number of workers."""
    return _select(plan, of_loader=True)


def _select(plan: Plan, *, of_loader: bool) -> Arm:
    catalogue = load_catalogue()
    return tuple(
        (name, value)
        for name, value in plan.items()
        if name not in _COUNTED_APART and (catalogue[name].stage == "loader") == of_loader
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    arm: Arm
    batch: int
    seconds: float


class ArmTimes:
    """Predicts seconds over batch size for any arm, from measured points of some.

    The arm with most points is the reference and has a curve of its own. Another arm is the reference times a ratio
    that may change with the batch. An arm without points is the measured one that shares most with it, times the
    ratios of the levers that differ, each as measured alone: gains multiply. That is a guess, good enough to rank.
    """

    def __init__(self, points: Iterable[Point]):
        self._points: dict[Arm, dict[int, float]] = {}
        for point in points:
            self._points.setdefault(point.arm, {})[point.batch] = point.seconds
        self._curve = Curve(max(self._points.values(), key=len))
        self._ratios = {arm: {b: s / self._curve(b) for b, s in found.items()} for arm, found in self._points.items()}
        self._singles = self._find_singles()
        self._bases: dict[Arm, tuple[Arm, frozenset[tuple[str, Any]]]] = {}

    def __call__(self, arm: Arm, batch: int) -> float:
        base, missing = self._bases.get(arm) or self._bases.setdefault(arm, self._find_base(arm))
        seconds = self._curve(batch) * _read_ratio(self._ratios[base], batch)
        for change in missing:
            seconds *= _read_ratio(self._singles.get(change, {}), batch)
        return seconds

    def _find_singles(self) -> dict[tuple[str, Any], dict[int, float]]:
        """Compute (lever, value) → ratios of an arm with it over the same arm with another value."""
        singles: dict[tuple[str, Any], dict[int, float]] = {}
        for arm, ratios in self._ratios.items():
            for other, base in self._ratios.items():
                changed = set(arm) - set(other)
                if len(changed) != 1:
                    continue
                shared = {b: ratios[b] / base[b] for b in ratios.keys() & base.keys()}
                found = shared or {b: ratios[b] / _read_ratio(base, b) for b in ratios}
                singles.setdefault(changed.pop(), {}).update(found)
        return singles

    def _find_base(self, arm: Arm) -> tuple[Arm, frozenset[tuple[str, Any]]]:
        """Find the measured arm that shares most with ``arm``, and what must change from it."""
        wanted = frozenset(arm)

        def count_unknown(base: Arm) -> tuple[int, int, int]:
            missing = wanted - frozenset(base)
            unknown = sum(change not in self._singles for change in missing)
            return unknown, len(missing), -len(self._points[base])

        base = min(self._points, key=count_unknown)
        return base, wanted - frozenset(base)


def _read_ratio(ratios: Mapping[int, float], batch: int) -> float:
    """Interpolate the ratio at a batch by its logarithm; beyond the points return the nearest, without any 1."""
    if not ratios:
        return 1.0
    if len(ratios) == 1 or batch <= min(ratios):
        return ratios[min(ratios)]
    if batch >= max(ratios):
        return ratios[max(ratios)]
    return Curve(ratios)(batch)


class LoaderTime:
    """Divides the time of a batch by the speed-up of its workers, interpolated between measured numbers of them.

    Beyond the largest measured number it grows as the cores allow: workers past the usable cores take turns.

    Args:
        points: Number of workers → points whose arm is the feed; at least one point each.
        n_cores: Usable cores.
    """

    def __init__(self, points: Mapping[int, Sequence[Point]], *, n_cores: int):
        self._n_cores = n_cores
        self._times = {n: ArmTimes(found) for n, found in points.items()}
        n_batches = {n: len({p.batch for p in found}) for n, found in points.items()}
        self._shaped = [n for n, found in n_batches.items() if found >= min(2, max(n_batches.values()))]
        self._speedups = self._compute_speedups(points)

    def __call__(self, feed: Arm, n_workers: int, batch: int) -> float:
        if n_workers in self._shaped:
            return self._times[n_workers](feed, batch)
        # Small batches cost more with many workers than with few: the shape of the nearest number counts.
        nearest = min(self._shaped, key=lambda n: abs(math.log((n + 1) / (n_workers + 1))))
        return self._times[nearest](feed, batch) * self._read_speedup(nearest) / self._read_speedup(n_workers)

    def _compute_speedups(self, by_workers: Mapping[int, Sequence[Point]]) -> dict[int, float]:
        """Compute the speed-up of each measured number of workers over one worker (or none).

        Like is held against like: where both were measured at a batch and a feed, nothing else counts.
        """
        smallest = min(by_workers)
        speedups = {smallest: float(max(smallest, 1))}
        known = by_workers[smallest]
        for n, points in by_workers.items():
            if n != smallest:
                alike = [p for p in points if any(p.batch == other.batch for other in known)] or points
                alike = [p for p in alike if any(p.arm == other.arm for other in known)] or alike
                logs = [math.log(self._times[smallest](p.arm, p.batch) / p.seconds) for p in alike]
                speedups[n] = speedups[smallest] * math.exp(sum(logs) / len(logs))
        return speedups

    def _read_speedup(self, n_workers: int) -> float:
        if n_workers in self._speedups:
            return self._speedups[n_workers]
        below = max((n for n in self._speedups if n < n_workers), default=None)
        above = min((n for n in self._speedups if n > n_workers), default=None)
        if below is None:
            return float(max(n_workers, 1))
        if above is not None:
            lowest = max(below, 0.5)
            return interpolate(n_workers, (lowest, above), (self._speedups[below], self._speedups[above]))
        usable, before = min(n_workers, self._n_cores), min(max(below, 1), self._n_cores)
        grown = self._speedups[below] * usable / before
        return grown if below else grown * LONE_EFFICIENCY
