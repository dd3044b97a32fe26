"""The last stage of every search: the fastest plans and the settings as they were, measured again side by side."""

from __future__ import annotations

from fulltilt.levers import find_obstacles
from fulltilt.tuner import recommend
from fulltilt.tuner.confirm import MAX_CONFIRM_ROUNDS, confirm
from fulltilt.tuner.session import BASELINE, REPEAT, Ask, Session
from fulltilt.tuner.space import Space

MAX_PASSES = 3


def run_finals(
    session: Session,
    space: Space,
    *,
    n_finalists: int,
    max_rounds: int = MAX_CONFIRM_ROUNDS,
    with_baseline: bool = True,
) -> None:
    """Confirm the finalists; others where all of them fail when they run again."""
    for _ in range(MAX_PASSES):
        finalists = recommend.select_finalists(session.rows, limit_gib=space.memory_gib, n=n_finalists)
        if not finalists:
            return
        baseline = plan_baseline(session, space) if with_baseline else None
        is_done = session.run(confirm(finalists, max_rounds=max_rounds, baseline=baseline), may_use_reserve=True)
        table, _ = recommend.merge_repeats(session.rows)
        if not is_done or any(row.plan in finalists and row.status == "ok" for row in table):
            return


def plan_baseline(session: Session, space: Space) -> Ask | None:
    """The user's own plan beside the finalists; of kind "baseline" where it is no point of the grid."""
    if find_obstacles(space.user_plan, space.facts):
        return None
    is_in_grid = any(row.plan == space.user_plan for row in session.rows)
    why = "the user's own plan, beside the finalists"
    return Ask(plan=space.user_plan, why=why, kind=REPEAT if is_in_grid else BASELINE)
