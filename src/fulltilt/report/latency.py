"""Draw the distribution of latencies: lines of a terminal, and a page with its percentiles."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from fulltilt.records import format_rate
from fulltilt.report.charts import Point, build_curve_chart
from fulltilt.report.html import build_figure, build_page

WIDTH = 44  # of the longest bar
N_POINTS = 120
Bin = tuple[float, float, int]


def count_histogram(ordered_s: NDArray[np.float64]) -> list[Bin]:
    """Count responses between bounds that grow by a constant factor; in milliseconds."""
    if not len(ordered_s) or ordered_s[-1] <= 0:
        return []
    low, high = max(ordered_s[0], 1e-3 * ordered_s[-1]), ordered_s[-1]
    edges = np.geomspace(low, max(high, 1.01 * low), 9)  # of 8 bins
    counts = np.histogram(np.clip(ordered_s, edges[0], edges[-1]), edges)[0]
    return [(1000 * float(a), 1000 * float(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def draw_histogram(bins: Sequence[Bin], *, limit: float | None = None) -> Iterator[str]:
    """Draw a line for each range of milliseconds; marks the range that holds the limit."""
    most = max((n for *_, n in bins), default=0)
    labels = [f"{format_rate(low)} to {format_rate(high)} ms" for low, high, _ in bins]
    for (low, high, n), label in zip(bins, labels, strict=True):
        bar = "█" * max(round(WIDTH * n / most), n > 0)
        mark = f" ← limit {format_rate(limit)} ms" if limit is not None and low <= limit < high else ""
        yield f"{label:>{max(map(len, labels))}}  {bar}{' ' if n else ''}{n:,}{mark}"


def build_latency_page(title: str, curves: Mapping[str, Sequence[float]]) -> str:
    """Build a page of percentiles: name of what was timed → its milliseconds in ascending order."""
    chart = build_latency_chart(curves)
    return build_page(title, [f"<h1>{escape(title)}</h1>", build_figure("Latency by percentile", chart)])


def build_latency_chart(curves: Mapping[str, Sequence[float]]) -> str:
    """Draw the percentiles of each name's milliseconds, which are in ascending order."""
    lines = {name: [_build_points(name, ordered)] for name, ordered in curves.items() if ordered}
    return build_curve_chart(lines, x_title="share of the requests, %", y_title="ms", is_log=True)


def _build_points(name: str, ordered: Sequence[float]) -> list[Point]:
    """Place points evenly in the middle, and ever closer towards the slowest."""
    n = len(ordered)
    ranks = {round(i * (n - 1) / N_POINTS) for i in range(N_POINTS + 1)} | {max(0, n - 1 - k) for k in range(10)}
    return [
        Point(
            x=100 * (rank + 1) / n,
            y=ordered[rank],
            label=f"{name}: {100 * (rank + 1) / n:.4g} % within {ordered[rank]:.4g} ms",
        )
        for rank in sorted(ranks)
    ]
