"""Say why no plan ran, or what keeps the figures of a search from being taken at face value."""

from collections.abc import Sequence

from fulltilt.errors import NoPlanError
from fulltilt.records import WHOLE_RUN, Trial
from fulltilt.report.summary import count
from fulltilt.stats.alternation import WORTH_PCT
from fulltilt.tuner.answer.picks import Picks
from fulltilt.tuner.answer.result import SearchSummary
from fulltilt.tuner.picks.failures import find_failure_remedy
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.session import Session


def check_ran(session: Session, space: Space) -> None:
    """Raise where the budget, or an error that all plans met, is why none ran to its end."""
    tried = [row for row in session.rows if row.status != "skipped"]
    if any(row.status == "ok" for row in tried):
        return
    if common := session.common_error:
        n_plans = len({row.plan for row in common})
        raise NoPlanError(
            f"no plan can run: {n_plans} different plans failed with the same error and none ran, so the search was "
            f"stopped; {common[0].id}: {common[0].reason}",
            remedy=find_failure_remedy(common),
        )
    if session.is_budget_spent:
        raise NoPlanError(_describe_failed(tried, space) if tried else _describe_untried(session))


def _describe_failed(tried: Sequence[Trial], space: Space) -> str:
    n_plans, n_grid = len({row.plan for row in tried}), count_grid(space) + len(space.skipped)
    were, they = ("was", "it") if n_plans == 1 else ("were", "all")
    reasons = {row.status: row for row in reversed(tried)}
    said = ". ".join(f"{status}, {row.id}: {row.reason}" for status, row in reasons.items())
    return (
        f"no plan ran: {count(n_plans, 'plan')} of {n_grid:,} {were} tried before the budget ended, and {they} failed: "
        f"{said}; where others may run, give a larger --budget"
    )


def _describe_untried(session: Session) -> str:
    n_probes = sum(probe.kind != "memory" for probe in session.probes)
    said = (
        "no plan was run: the budget was gone before the first run ended "
        f"({session.elapsed_s:.0f} s went into starting and {count(n_probes, 'probe')})"
    )
    if session.cut is None:
        return f"{said}; give a larger --budget"
    return f"{said}; {session.cut.id} was ended: {session.cut.reason}"  # which ends with the remedy


def _describe_next(session: Session) -> str:
    """Say what the same command would do; a promise only where it would begin something."""
    shortfall = session.find_shortfall()
    if shortfall is None:
        return "the same command goes on from these rows"
    begun = "nothing further was begun" if not session.n_run else "the same command would come no further"
    return f"{begun}: {shortfall.describe()}"


def list_doubts(session: Session, picks: Picks, summary: SearchSummary, space: Space) -> list[str]:
    """List what keeps the figures from being taken at face value."""
    notes, chosen = [], picks.recommended.trial
    if session.is_budget_spent:
        ran = {row.plan for row in session.rows if row.kind == WHOLE_RUN and row.status != "skipped"}
        n_left = max(0, count_grid(space) - sum(space.holds(plan) for plan in ran))
        left = f"{n_left:,} plans of the grid were not run"
        if summary.strategy != "exhaustive":
            left += ", of which it would have chosen a few, or plans that were to take turns"
        notes.append(f"the budget ended the search: {left}; {_describe_next(session)}")
    if session.cut is not None:
        notes.append(
            f"the budget ended {session.cut.id} after {session.cut.seconds:.1f} s: it is no row ({session.cut.why})"
        )
    notes += _note_off_the_list(session, chosen, space)
    if len({row.plan for row in session.rows if row.status == "ok"}) == 1:
        notes.append(f"{chosen.id} is the only plan that ran to its end: it is recommended for want of another")
    return notes


def _note_off_the_list(session: Session, chosen: Trial, space: Space) -> list[str]:
    """Say where the settings as they were won with values that are not among those that were asked for."""
    off = {name: values for name, values in space.axes.items() if chosen.plan[name] not in values}
    if not off or chosen.plan != space.user_plan:  # a lever that cannot matter goes back to its default, for instance
        return []
    said = " and ".join(
        f"{name} {chosen.plan[name]}, which is not among {', '.join(map(str, values))}" for name, values in off.items()
    )
    ran = any(row.status == "ok" and all(row.plan[n] in values for n, values in off.items()) for row in session.rows)
    slower = f"none of these proved faster by more than {WORTH_PCT:g} % below the memory limit"
    return [f"the settings as they were stay, with {said}: {slower if ran else 'none of these ran to its end'}"]
