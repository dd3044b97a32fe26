"""The time of a search that was given none."""

DEFAULT_BUDGET_S = 180.0
DEFAULT_RUNS = 24  # as long as the first one: where they take longer than that, the default is time for so many more
QUICK_BUDGET_S = 90.0


def compute_default_s(run_s: float) -> float:
    """Return the budget of a search whose first whole run took ``run_s``: the same when it is resumed."""
    return max(DEFAULT_BUDGET_S, (1 + DEFAULT_RUNS) * run_s)
