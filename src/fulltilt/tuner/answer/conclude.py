"""Make the result of a search from its rows: what was found, what it cost, and how far it can be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fulltilt.errors import NoPlanError
from fulltilt.records import Plan, Roof, Trial
from fulltilt.report.summary import count
from fulltilt.tuner.answer.finish import finish_result
from fulltilt.tuner.answer.hints import find_hints, find_search_hints
from fulltilt.tuner.answer.result import EpochSeconds, SearchSummary, TuneResult, build_epoch_seconds
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.failures import find_failure_remedy
from fulltilt.tuner.picks.picks import Picks
from fulltilt.tuner.picks.undecided import INDIFFERENCE_PCT, compute_detectable_pct
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search import strategies
from fulltilt.tuner.search.search import Search
from fulltilt.tuner.search.session import END_TO_END, Session

NOISE_PCT = 10.0


def select_baseline(rows: Sequence[Trial], user_plan: Plan) -> Trial | None:
    """Select the row of the user's plan: that of its median run, of those that ended well where any did."""
    runs = [row for row in rows if row.plan == user_plan]
    own, _ = recommend.merge_repeats([row for row in runs if row.status == "ok"] or runs)
    return own[0] if own else None


def conclude(search: Search, roofs: Sequence[Roof], roofs_missing: str) -> TuneResult:
    """Make the result: table, picks, what they save, and what keeps the figures from being taken at face value.

    Args:
        roofs_missing: Why there are no roofs, where there are none.

    Raises:
        NoPlanError: no row is ok, or the budget was gone before there was one.
    """
    aim, probe, space, session = search.question.aim, search.probe, search.space, search.session
    _check_ran(session, space)
    table, _ = recommend.merge_repeats(session.rows)
    baseline = select_baseline(session.rows, space.user_plan)
    shown = {row.id for row in (*table, baseline) if row}
    repeats = [row for row in session.rows if row.id not in shown]
    picks = recommend.pick(table, user_plan=space.user_plan, memory_limit_gib=search.memory_gib, runs=session.rows)
    chosen, n_samples = picks.recommended.trial, probe.facts.n_samples
    rate = recommend.plan_learning_rate(
        probe.workload.get("learning_rate"),
        user_plan=space.user_plan,
        plan=chosen.plan,
        rule=search.options.lr_rule,
        is_batch_free=space.effective_batch_size is None,
    )
    summary = _summarize(search, table, repeats, picks)
    epoch = build_epoch_seconds(chosen, n_samples, runs=session.rows)
    built = {key: value for key, value in probe.workload.items() if key not in ("name", "notes")}
    # What building the workload noted, without advice on levers that the search has varied since.
    kept = [note for note in probe.workload.get("notes", ()) if note.partition("=")[0] not in space.axes]
    result = TuneResult(
        machine=dataclasses.replace(search.question.machine, roofs=tuple(roofs)),
        workload={"name": aim.name, "task": aim.config.task, **built},
        trials=tuple(table),
        picks=picks,
        search=summary,
        learning_rate=rate,
        epoch_seconds=epoch,
        user_plan=space.user_plan,
        baseline=baseline,
        repeats=tuple(repeats),
        probes=tuple(session.probes),
        hints=(*find_hints(chosen, search.memory_gib), *find_search_hints(table)),
        notes=(*session.journal.notes, *space.notes, *kept, *_note_trust(session, chosen, summary, space)),
        null_reasons=_explain_nulls(picks, rate, epoch, baseline, summary, n_samples),
        folder=str(search.folder.path),
    )
    n_epochs = aim.config.run.epochs
    return finish_result(result, axes=space.axes, facts=space.facts, n_epochs=n_epochs, roofs_missing=roofs_missing)


def _check_ran(session: Session, space: Space) -> None:
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


def _note_trust(session: Session, chosen: Trial, summary: SearchSummary, space: Space) -> list[str]:
    """List what keeps the figures from being taken at face value."""
    notes = []
    if session.is_budget_spent:
        ran = {row.plan for row in session.rows if row.kind == END_TO_END and row.status != "skipped"}
        n_left = max(0, count_grid(space) - sum(space.holds(plan) for plan in ran))
        left = f"{n_left:,} plans of the grid were not run"
        if summary.strategy != "exhaustive":
            left += ", of which it would have chosen a few, or runs that were to be repeated"
        notes.append(f"the budget ended the search: {left}; {_describe_next(session)}")
    if session.cut is not None:
        notes.append(
            f"the budget ended {session.cut.id} after {session.cut.seconds:.1f} s: it is no row ({session.cut.why})"
        )
    notes += _note_off_the_list(session, chosen, space)
    confirmed = recommend.find_confirmed(session.rows)
    if len({row.plan for row in session.rows if row.status == "ok"}) == 1:
        notes.append(f"{chosen.id} is the only plan that ran to its end: it is recommended for want of another")
    elif confirmed and all(row.plan == chosen.plan for row in confirmed):
        notes.append("the recommended plan was measured again, and no other beside it: nothing says it is the faster")
    if not any(row.kind in recommend.CONFIRMING and row.plan == chosen.plan for row in session.rows):
        why = "the budget was spent" if session.is_budget_spent else "no plan that was measured again could be taken"
        notes.append(f"the recommended plan was measured once, not again beside the runner-up: {why}")
    if summary.noise_pct is not None and summary.noise_pct > NOISE_PCT:
        why = "" if session.is_budget_spent else ": the same command only reads these rows back"
        causes = ", or processes took their memory differently (retain_freed_memory)"
        notes.append(
            f"runs of one and the same plan lay {summary.noise_pct:.0f} % apart: other programs used this machine, or "
            f"its clock changed{causes if space.facts.device_type == 'cpu' else ''}; smaller differences between rows "
            f"mean nothing. Search again when it is quiet, with --out and a new folder{why}"
        )
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
    slower = f"none of these proved faster by more than {INDIFFERENCE_PCT:g} % below the memory limit"
    return [f"the settings as they were stay, with {said}: {slower if ran else 'none of these ran to its end'}"]


def _summarize(search: Search, table: Sequence[Trial], repeats: Sequence[Trial], picks: Picks) -> SearchSummary:
    space, session = search.space, search.session
    confirmed = recommend.find_confirmed(session.rows)  # from one stretch of time: drift before it says nothing here
    whole = [row for row in session.rows if row.status == "ok"]
    spreads = [
        recommend.compute_spread_pct([row for row in confirmed if row.plan == plan])
        for plan in {row.plan for row in confirmed}
    ]
    return SearchSummary(
        strategy=strategies.name_strategy(search.options.strategy),
        grid_size=count_grid(space) + len(space.skipped),
        n_trials=len(table),
        n_end_to_end=sum(row.status != "skipped" for row in session.rows),
        n_out_of_memory=sum(row.status == "out_of_memory" for row in table),
        seconds=session.elapsed_s,
        earlier_s=session.earlier_s,
        n_skipped=sum(row.status == "skipped" for row in table),
        n_repeats=len(repeats),
        n_resumed=session.n_resumed,
        n_probes=sum(row.kind != "memory" for row in session.probes),
        n_collapsed=space.n_combinations - count_grid(space) if space.axes else 0,
        memory_limit_gib=search.memory_gib,
        memory_safety_pct=recommend.MEMORY_SAFETY_PCT,
        stopped_by_budget=session.is_budget_spent,
        noise_pct=max((spread for spread in spreads if spread is not None), default=None),
        detectable_pct=compute_detectable_pct(confirmed, whole),
        n_undecided=len(picks.recommended.tied_with),
        n_off_grid=sum(row.status != "skipped" and not space.holds(row.plan) for row in table),
    )


def _explain_nulls(
    picks: Picks,
    rate: recommend.LearningRate,
    epoch: EpochSeconds,
    baseline: Trial | None,
    summary: SearchSummary,
    n_samples: int | None,
) -> dict[str, str]:
    """Say why figures are None, by dotted name."""
    no_rate = "the workload's learning rate could not be read"
    no_epoch = "the dataset has no length" if n_samples is None else "no throughput"
    facts = {
        "picks.efficiency": (picks.efficiency, "no row has a memory figure"),
        "picks.memory": (picks.memory, "no row has a memory figure"),
        "learning_rate.from": (rate.start, no_rate),
        "learning_rate.to": (rate.start, no_rate),
        "epoch_seconds.estimate": (epoch.estimate, no_epoch),
        "epoch_seconds.ci95": (
            epoch.ci95, no_epoch if epoch.estimate is None else "the recommended row has no interval"
        ),
        "search.noise_pct": (summary.noise_pct, "no plan ran twice side by side"),
        "search.detectable_pct": (summary.detectable_pct, "no plans ran side by side"),
        "search.memory_limit_gib": (summary.memory_limit_gib, "the memory of the device could not be read"),
        "baseline": (baseline, "the user's own plan was not run: the budget ended before it"),
    }  # fmt: skip
    return {name: reason for name, (value, reason) in facts.items() if value is None}
