"""The service surface: how long a batch of so many samples of such a length takes."""

import bisect
import dataclasses
from collections.abc import Sequence

from fulltilt.infer.search.lengths import Lengths
from fulltilt.infer.search.simulate import Service

BATCHES = (1, 2, 4, 8, 16, 32, 64)
COARSE_BATCHES = (1, 8, 32)
MAX_CALL_S = 1.0  # slower calls are not measured: smaller batches are as fast a sample long before


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Point:
    """A shape that is measured: samples of a batch, all of one length."""

    length: int
    batch: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """Seconds of a call at the measured points; between them linear, beyond them as between the last two.

    Attributes:
        jitter: Single calls over the median of their point, sorted: how service times scatter.
    """

    points: tuple[Point, ...]
    seconds: tuple[float, ...]
    jitter: tuple[float, ...] = (1.0,)

    def build_service(self) -> Service:
        return Service(estimate_s=Estimator(self).estimate_s, jitter=self.jitter)


class Estimator:
    """Estimates seconds from a surface; keeps what it has computed, for a simulation asks a million times."""

    def __init__(self, surface: Surface):
        rows: dict[int, list[tuple[int, float]]] = {}
        for point, seconds in sorted(zip(surface.points, surface.seconds, strict=True)):
            rows.setdefault(point.length, []).append((point.batch, seconds))
        self._rows = rows
        self._known: dict[tuple[int, int], float] = {}

    def estimate_s(self, batch: int, length: int) -> float:
        """Estimate the seconds of a batch, padded to ``length``."""
        key = (batch, length)
        if key not in self._known:
            column = [(at, _interpolate(row, batch)) for at, row in self._rows.items()]
            self._known[key] = _interpolate(column, length)
        return self._known[key]


def plan_points(lengths: Lengths, one_s: float, *, is_coarse: bool, max_batch: int | None = None) -> tuple[Point, ...]:
    """Plan the points of a surface.

    Args:
        one_s: Seconds of one sample of the longest length in eager mode.
        is_coarse: A few points, enough to see who has no chance.
    """
    batches = [b for b in (COARSE_BATCHES if is_coarse else BATCHES) if b <= (max_batch or b)]
    edges = lengths.edges if lengths.vary else (lengths.longest,)
    if is_coarse:
        edges = sorted({edges[len(edges) // 2], edges[-1]})
    points = []
    for length in edges:
        each_s = one_s * length / lengths.longest
        kept = [b for b in batches if b * each_s <= MAX_CALL_S] or [1]
        points += [Point(length=length, batch=b) for b in kept]
    return tuple(points)


def _interpolate(line: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate between neighbours; beyond the ends go on from the last two, never below a tenth of the nearest."""
    if len(line) == 1:
        return line[0][1] * max(1.0, at / line[0][0])
    i = min(max(bisect.bisect_left(line, at, key=lambda each: each[0]), 1), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y0, y1) / 10)
