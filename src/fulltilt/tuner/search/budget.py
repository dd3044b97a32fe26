"""Reserve part of the budget for measuring peak speeds, and compute the budget that refused runs need."""

import dataclasses
import math

ROOFS_S = 8.0  # what measuring the roofs takes: 2.5 s, and the start of a process on a slow machine
ROOFS_SHARE = 0.1  # of the budget at most is kept back for it
SPARE = 1.1  # times what is needed is advised: the next start may take longer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Describes runs that were not started, or were stopped, because the budget ended."""

    next_s: float  # what they are expected to take
    n_runs: int = 1  # that say nothing without each other
    kept_s: float = 0.0  # of the time left, for what must follow
    left_s: float  # of the budget, when they were asked for
    search_s: float  # that a search needs which begins with them
    is_cut: bool = False  # it was begun, and takes longer than this

    def describe(self) -> str:
        """Say what was refused: ``the next run takes about 3.1 s and 2.0 s of the budget were left; give at …``."""
        what = "the next run takes about"
        if self.n_runs > 1:
            what = f"the next {self.n_runs} runs, which go together, take about"
        if self.is_cut:
            what = "the run that was ended takes more than"
        kept = f", {self.kept_s:.1f} s are kept back for those after," if self.kept_s >= 0.05 else ""
        budget_s = math.ceil(SPARE * compute_budget_s(self.search_s))
        left_s = max(0.0, self.left_s)
        return (
            f"{what} {self.next_s:.1f} s{kept} and {left_s:.1f} s of the budget were left; "
            f"give at least --budget {budget_s}s"
        )


def compute_search_s(budget_s: float) -> float:
    """Return the seconds of a budget left after reserving time to measure matmul and copy speed."""
    return budget_s - min(ROOFS_S, ROOFS_SHARE * budget_s)


def compute_budget_s(search_s: float) -> float:
    """Return the budget that leaves so many seconds for the search."""
    return min(search_s / (1 - ROOFS_SHARE), search_s + ROOFS_S)
