"""Interpolate a positive quantity over the batch size, and go a little beyond its points."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping

LONE_EXPONENT = 0.8  # of the batch, where one point is all there is: a part of a step does not grow with the batch


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
