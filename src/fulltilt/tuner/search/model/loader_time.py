"""Predict the seconds per batch of the loader alone, over workers and batch size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fulltilt.tuner.search.model.arms import Arm, ArmTimes, Point, interpolate

LONE_EFFICIENCY = 0.85  # of a worker, where none was measured


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
