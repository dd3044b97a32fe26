"""Which rows are as good as the best one."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = tuple[float, tuple[float, float] | None]

INDIFFERENCE_PCT = 2.0
MAX_GAP_PCT = 3.0


def find_ties(
    rows: Sequence[Row], indifference_pct: float = INDIFFERENCE_PCT, *, max_gap_pct: float = MAX_GAP_PCT
) -> tuple[int, ...]:
    """Indices of the rows tied with the best one, best first; higher values are better.

    A row ties when it is within ``indifference_pct`` of the best, or when it is within ``max_gap_pct`` and the two
    intervals cannot tell them apart. The second limit keeps a noisy row from tying with whatever is far away. Ties
    are with the best row only, so they do not chain down a slope.

    Args:
        rows: ``(value, (low, high))`` each; an interval that is ``None`` or not finite is not known, and such a
            row ties by its value alone.

    Raises:
        ValueError: a value that is not finite or not above 0.
    """
    for index, (value, _) in enumerate(rows):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"row {index} has value {value}; only measured values above 0 can be compared")
    if not rows:
        return ()
    ranking = sorted(range(len(rows)), key=lambda index: -rows[index][0])
    best = rows[ranking[0]]
    return tuple(i for i in ranking if _is_tied(best, rows[i], indifference_pct, max_gap_pct))


def _is_tied(best: Row, row: Row, indifference_pct: float, max_gap_pct: float) -> bool:
    gap = best[0] - row[0]
    if gap <= best[0] * indifference_pct / 100:
        return True
    if gap > best[0] * max_gap_pct / 100:
        return False
    half_widths = [_half_width(best), _half_width(row)]
    return None not in half_widths and gap <= math.hypot(*(h for h in half_widths if h is not None))


def _half_width(row: Row) -> float | None:
    if row[1] is None or not all(math.isfinite(bound) for bound in row[1]):
        return None
    low, high = row[1]
    return (high - low) / 2
