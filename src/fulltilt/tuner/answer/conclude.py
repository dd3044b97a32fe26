"""From the rows of a search to its result: what was found, what it cost, and how far it can be trusted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fulltilt.errors import NoPlanError
from fulltilt.records import Plan, Roof, Trial
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
from fulltilt.tuner.trials.target import ProbeResult

NOISE_PCT = 10.0


def select_baseline(rows: Sequence[Trial], user_plan: Plan) -> Trial | None:
    """The row of the user's plan: that of its median run, of those that ended well where any did."""
    runs = [row for row in rows if row.plan == user_plan]
    own, _ = recommend.merge_repeats([row for row in runs if row.status == "ok"] or runs)
    return own[0] if own else None


def conclude(search: Search, roofs: Sequence[Roof], roofs_missing: str) -> TuneResult:
    """Make the result: table, picks, what they save, and what keeps the figures from being taken at face value.

    Args:
        roofs_missing: Why there are none, where there are none.

    Raises:
        NoPlanError: no row is ok, or the budget was gone before there was one.
    """
    _check_ran(search.session, search.space)
    return finish_result(
        _assemble(search, roofs),
        axes=search.space.axes,
        facts=search.space.facts,
        n_epochs=search.question.aim.config.run.epochs,
        roofs_missing=roofs_missing,
    )


def _check_ran(session: Session, space: Space) -> None:
    """Why no plan ran to its end, where the budget or an error that all met is the reason, not the plans."""
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
    plans = {row.plan for row in tried}
    n_grid = count_grid(space) + len(space.skipped)
    counted = "1 plan" if len(plans) == 1 else f"{len(plans)} plans"
    were, they = ("was", "it") if len(plans) == 1 else ("were", "all")
    reasons = {row.status: row for row in reversed(tried)}
    said = ". ".join(f"{status}, {row.id}: {row.reason}" for status, row in reasons.items())
    return (
        f"no plan ran: {counted} of {n_grid:,} {were} tried before the budget ended, and {they} failed: {said}; "
        "where others may run, give a larger --budget"
    )


def _describe_untried(session: Session) -> str:
    said = "no plan was run: the budget was gone before the first run ended"
    n_probes = sum(probe.kind != "memory" for probe in session.probes)
    done = f"{session.elapsed_s:.0f} s went into starting and {n_probes} probe{'' if n_probes == 1 else 's'}"
    if session.cut is None:
        return f"{said} ({done}); give a larger --budget"
    return f"{said} ({done}); {session.cut.id} was ended: {session.cut.reason}"  # which ends with the remedy


def _describe_next(session: Session) -> str:
    """What the same command would do; a promise only where it would begin something."""
    shortfall = session.find_shortfall()
    if shortfall is None:
        return "the same command goes on from these rows"
    begun = "nothing further was begun" if not session.n_run else "the same command would come no further"
    return f"{begun}: {shortfall.describe()}"


def _assemble(search: Search, roofs: Sequence[Roof]) -> TuneResult:
    """Make the result without what ``finish_result`` adds."""
    aim, probe, space, session = search.question.aim, search.probe, search.space, search.session
    table, _ = recommend.merge_repeats(session.rows)
    baseline = select_baseline(session.rows, space.user_plan)
    shown = {row.id for row in table} | ({baseline.id} if baseline else set())
    repeats = [row for row in session.rows if row.id not in shown]
    picks = recommend.pick(table, user_plan=space.user_plan, memory_limit_gib=search.memory_gib, runs=session.rows)
    chosen, n_samples = picks.recommended.trial, probe.facts.n_samples
    rate = _plan_rate(search, chosen.plan)
    summary = _summarize(search, table, repeats, picks)
    epoch = build_epoch_seconds(chosen, n_samples, runs=session.rows)
    return TuneResult(
        machine=dataclasses.replace(search.question.machine, roofs=tuple(roofs)),
        workload={"name": aim.name, "task": aim.config.task, **_describe_probe(probe)},
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
        notes=(
            *session.journal.notes,
            *space.notes,
            *_list_notes_of_kept(probe, space),
            *_note_trust(session, chosen, summary, space),
        ),
        null_reasons=_explain_nulls(search, picks, rate, epoch, baseline, summary),
        folder=str(search.folder.path),
    )


def _plan_rate(search: Search, plan: Plan) -> recommend.LearningRate:
    return recommend.plan_learning_rate(
        search.probe.workload.get("learning_rate"),
        user_plan=search.space.user_plan,
        plan=plan,
        rule=search.options.lr_rule,
        is_batch_free=search.space.effective_batch_size is None,
    )


def _note_trust(session: Session, chosen: Trial, summary: SearchSummary, space: Space) -> list[str]:
    """What keeps the figures from being taken at face value."""
    notes = []
    if session.is_budget_spent:
        ran = {row.plan for row in session.rows if row.kind == END_TO_END and row.status != "skipped"}
        ran = {plan for plan in ran if space.holds(plan)}
        left = f"{max(0, count_grid(space) - len(ran)):,} plans of the grid were not run"
        if summary.strategy != "exhaustive":
            left += ", of which it would have chosen a few, or runs that were to be repeated"
        notes.append(f"the budget ended the search: {left}; {_describe_next(session)}")
    if session.cut is not None:
        notes.append(
            f"the budget ended {session.cut.id} after {session.cut.seconds:.1f} s: it is no row ({session.cut.why})"
        )
    if (off := _note_off_the_list(session, chosen, space)) is not None:
        notes.append(off)
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
        on_cpu = space.facts.device_type == "cpu"
        causes = ", or processes took their memory differently (retain_freed_memory)" if on_cpu else ""
        notes.append(
            f"runs of one and the same plan lay {summary.noise_pct:.0f} % apart: other programs used this machine, or "
            f"its clock changed{causes}; smaller differences between rows mean nothing. Search again when it is "
            f"quiet, with --out and a new folder{why}"
        )
    return notes


def _note_off_the_list(session: Session, chosen: Trial, space: Space) -> str | None:
    """The settings as they were compete too: where they win, values that were asked for may not be among theirs."""
    off = {n: values for n, values in space.axes.items() if chosen.plan[n] not in values}
    if not off or chosen.plan != space.user_plan:  # a lever that cannot matter goes back to its default, for instance
        return None
    said = " and ".join(
        f"{name} {chosen.plan[name]}, which is not among {', '.join(map(str, values))}" for name, values in off.items()
    )
    ran = any(row.status == "ok" and all(row.plan[n] in values for n, values in off.items()) for row in session.rows)
    slower = f"none of these proved faster by more than {INDIFFERENCE_PCT:g} % below the memory limit"
    why = slower if ran else "none of these ran to its end"
    return f"the settings as they were stay, with {said}: {why}"


def _summarize(search: Search, table: Sequence[Trial], repeats: Sequence[Trial], picks: Picks) -> SearchSummary:
    space, session = search.space, search.session
    confirmed = recommend.find_confirmed(session.rows)  # from one stretch of time: drift before it says nothing here
    whole = [row for row in session.rows if row.status == "ok"]
    spreads = [
        spread
        for plan in {row.plan for row in confirmed}
        if (spread := recommend.compute_spread_pct([row for row in confirmed if row.plan == plan])) is not None
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
        noise_pct=max(spreads, default=None),
        detectable_pct=compute_detectable_pct(confirmed, whole),
        n_undecided=len(picks.recommended.tied_with),
        n_off_grid=sum(row.status != "skipped" and not space.holds(row.plan) for row in table),
    )


def _list_notes_of_kept(probe: ProbeResult, space: Space) -> list[str]:
    """What building the settings as they were noted, without advice on levers that the search has varied since."""
    return [note for note in probe.workload.get("notes", ()) if note.partition("=")[0] not in space.axes]


def _describe_probe(probe: ProbeResult) -> dict[str, object]:
    return {key: value for key, value in probe.workload.items() if key not in ("name", "notes")}


def _explain_nulls(
    search: Search,
    picks: Picks,
    rate: recommend.LearningRate,
    epoch: EpochSeconds,
    baseline: Trial | None,
    summary: SearchSummary,
) -> dict[str, str]:
    reasons, n_samples = {}, search.probe.facts.n_samples
    if picks.efficiency is None:
        reasons["picks.efficiency"] = "no row has a memory figure"
    if rate.start is None:
        reasons["learning_rate.from"] = reasons["learning_rate.to"] = "the workload's learning rate could not be read"
    if epoch.estimate is None:
        reasons["epoch_seconds.estimate"] = "the dataset has no length" if n_samples is None else "no throughput"
    if epoch.ci95 is None:
        no_interval = "the recommended row has no interval"
        reasons["epoch_seconds.ci95"] = reasons.get("epoch_seconds.estimate", no_interval)
    if summary.noise_pct is None:
        reasons["search.noise_pct"] = "no plan ran twice side by side"
    if summary.detectable_pct is None:
        reasons["search.detectable_pct"] = "no plans ran side by side"
    if baseline is None:
        reasons["baseline"] = "the user's own plan was not run: the budget ended before it"
    if search.memory_gib is None:
        reasons["search.memory_limit_gib"] = "the memory of the device could not be read"
    return reasons
