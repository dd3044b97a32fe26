"""When a search is to stop because its workload is broken, not its plans."""

from __future__ import annotations

from collections.abc import Sequence

from fulltilt.records import WHOLE_RUNS, Trial

N_PLANS = 3  # that failed in the same words: fewer may be one lever's fault


def find_common_error(rows: Sequence[Trial]) -> list[Trial]:
    """The rows that say the same error of at least ``N_PLANS`` plans, where nothing of their kind ran; else none.

    Out of memory and a deadline are no such errors: another plan may well fit. Neither are estimates on fake tensors,
    which cannot run every model.
    """
    alike: dict[str, list[Trial]] = {}
    for row in rows:
        if row.status == "error" and row.kind != "memory":
            alike.setdefault(_read_words(row), []).append(row)
    for failed in alike.values():
        kinds = {*WHOLE_RUNS, *(row.kind for row in failed)}
        has_run = any(row.status == "ok" and row.kind in kinds for row in rows)
        if len({row.plan for row in failed}) >= N_PLANS and not has_run:
            return failed
    return []


def _read_words(row: Trial) -> str:
    """The reason without the log it points to, which every trial has its own of."""
    return (row.reason or "").partition(" (log: ")[0]
