"""Select the plans that go into the deciding comparison, by their single whole runs and their memory."""

from collections.abc import Sequence

from fulltilt.records import Plan, Trial
from fulltilt.tuner.picks.changes import compute_simplicity
from fulltilt.tuner.picks.speed import is_noisy, read_rate

MEMORY_SAFETY_PCT = 80.0
MEMORY_TIE_PCT = 2.0
N_FINALISTS = 3
N_NOISY_FINALISTS = 4  # the fastest of many noisy runs is mostly a lucky one
REACH_PCT = 15.0  # of speed: what single runs may be off by together
NOISY_REACH_PCT = 40.0


def select_finalists(rows: Sequence[Trial], *, limit_gib: float | None) -> list[Plan]:
    """Select the fastest plans that may be recommended, and the simplest of those nearly as fast.

    Args:
        rows: Whole runs, one a plan.
    """
    fine = find_recommendable([row for row in rows if row.status == "ok"], limit_gib)
    noisy = is_noisy(fine)
    n = N_NOISY_FINALISTS if noisy else N_FINALISTS
    ranked = sorted(fine, key=read_rate, reverse=True)
    least = read_rate(ranked[0]) * (1 - (NOISY_REACH_PCT if noisy else REACH_PCT) / 100) if ranked else 0.0
    close = [row for row in ranked if read_rate(row) >= least]
    chosen = close[:n]
    if len(close) > n:
        chosen[-1] = min(close[n - 1 :], key=lambda row: (*compute_simplicity(row.plan), -read_rate(row)))
    return [row.plan for row in chosen]


def find_recommendable(rows: Sequence[Trial], limit_gib: float | None) -> list[Trial]:
    """Find the rows under the limit; else those with the least memory, up to ``MEMORY_TIE_PCT`` more."""
    return filter_safe(rows, limit_gib) or filter_smallest(rows)


def filter_safe(rows: Sequence[Trial], limit_gib: float | None) -> list[Trial]:
    """Keep the rows under the limit. A row without a memory figure passes only when no row has one."""
    if limit_gib is None or all(row.device_memory_peak_gib is None for row in rows):
        return list(rows)
    return [row for row in rows if (memory := row.device_memory_peak_gib) is not None and memory <= limit_gib]


def filter_smallest(rows: Sequence[Trial]) -> list[Trial]:
    """Keep the rows with the least memory, and those with hardly more."""
    known = [(row, memory) for row in rows if (memory := row.device_memory_peak_gib) is not None]
    least_gib = min((memory for _, memory in known), default=0.0)
    return [row for row, memory in known if memory <= least_gib * (1 + MEMORY_TIE_PCT / 100)]
