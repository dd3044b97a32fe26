"""End every search: measure the fastest plans and the user's own again, side by side."""

from __future__ import annotations

from fulltilt.levers import find_obstacles
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.confirm import confirm
from fulltilt.tuner.search.session import BASELINE, REPEAT, Ask, Session

MAX_PASSES = 3


def run_finals(
    session: Session,
    space: Space,
    *,
    n_finalists: int,
) -> None:
    """Measure the finalists again; others where all of them fail when they run again.

    The user's own plan runs beside them. Where it is the only finalist, so does the next fastest; where the budget left
    none, nothing is measured again: the same command goes on with the search instead.
    """
    for _ in range(MAX_PASSES):
        finalists = recommend.select_finalists(session.rows, limit_gib=space.memory_gib, n=n_finalists)
        if finalists == [space.user_plan]:
            finalists = recommend.select_finalists(session.rows, limit_gib=space.memory_gib, n=2)
        if not finalists or (session.is_budget_spent and finalists == [space.user_plan]):
            return
        is_done = session.run(confirm(finalists, baseline=plan_baseline(space)), may_use_reserve=True)
        table, _ = recommend.merge_repeats(session.rows)
        if not is_done or any(row.plan in finalists and row.status == "ok" for row in table):
            return


def plan_baseline(space: Space) -> Ask | None:
    """Ask for the user's own plan beside the finalists; of kind "baseline" where it lies off the grid."""
    if find_obstacles(space.user_plan, space.facts):
        return None
    why = "the user's own plan, beside the finalists"
    return Ask(plan=space.user_plan, why=why, kind=REPEAT if space.holds(space.user_plan) else BASELINE)
