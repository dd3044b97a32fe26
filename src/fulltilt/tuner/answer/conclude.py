"""Make the result of a search from its rows: what was found, what it cost, and how far it can be trusted."""

import dataclasses
from collections.abc import Sequence

from fulltilt.records import Plan, Roof, Trial
from fulltilt.tuner.answer.advice import build_advice
from fulltilt.tuner.answer.doubts import check_ran, list_doubts
from fulltilt.tuner.answer.hints import find_hints, find_search_hints
from fulltilt.tuner.answer.lever_advice import Findings
from fulltilt.tuner.answer.result import SearchSummary, TuneResult, build_epoch_seconds
from fulltilt.tuner.answer.savings import build_savings
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.picks import Pick, Picks
from fulltilt.tuner.picks.undecided import compute_detectable_pct
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.search import strategies
from fulltilt.tuner.search.search import Search

UNPROVEN = "; its pairs of runs do not prove the settings as they were slower: a tie too"


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
    check_ran(session, space)
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
    built = {key: value for key, value in probe.workload.items() if key not in ("name", "notes")}
    # What building the workload noted, without advice on levers that the search has varied since.
    kept = [note for note in probe.workload.get("notes", ()) if note.partition("=")[0] not in space.axes]
    summary = _summarize(search, table, repeats, picks)
    result = TuneResult(
        machine=dataclasses.replace(search.question.machine, roofs=tuple(roofs)),
        workload={"name": aim.name, "task": aim.config.task, **built},
        trials=tuple(table),
        picks=picks,
        search=summary,
        learning_rate=rate,
        epoch_seconds=build_epoch_seconds(chosen, n_samples, runs=session.rows),
        user_plan=space.user_plan,
        baseline=baseline,
        repeats=tuple(repeats),
        probes=tuple(session.probes),
        hints=(*find_hints(chosen, search.memory_gib), *find_search_hints(table)),
        notes=(*session.journal.notes, *space.notes, *kept, *list_doubts(session, chosen, summary, space)),
        folder=str(search.folder.path),
    )
    return _add_savings_and_advice(result, search, roofs_missing)


def _add_savings_and_advice(result: TuneResult, search: Search, roofs_missing: str) -> TuneResult:
    """Add what the plan saves and what would make it faster, and for every null of the result why it is one."""
    space, runs, roofs = search.space, search.session.rows, result.machine.roofs
    chosen = result.picks.recommended.trial
    savings, savings_reasons = build_savings(
        runs,
        baseline=result.baseline,
        recommended=chosen,
        n_samples=result.workload.get("n_samples"),
        n_epochs=search.question.aim.config.run.epochs,
        search_s=result.search.seconds + result.search.earlier_s,
    )
    if savings is not None and savings.verdict == "no gain":
        result = tie_with_baseline(result)
    found = Findings(
        recommended=chosen,
        rows=runs,
        probes=result.probes,
        roofs=roofs,
        axes=space.axes,
        facts=space.facts,
        noise_pct=result.search.noise_pct,
        tied={row.plan for row in runs if row.id in result.picks.recommended.tied_with},
    )
    advice, advice_reasons = build_advice(found)
    if roofs_missing and not roofs:
        advice_reasons["advice.roof"] = roofs_missing
    reasons = {**_explain_nulls(result, search.probe.facts.n_samples), **savings_reasons, **advice_reasons}
    return dataclasses.replace(result, savings=savings, advice=advice, null_reasons=reasons)


def tie_with_baseline(result: TuneResult) -> TuneResult:
    """Leave the settings as they were undecided where their pairs of runs prove no gain.

    Ties are found by the runs of all plans, which may tell the two apart where two pairs alone do not: ``0 plans left
    undecided`` then stood beside ``no gain that this search could prove``.
    """
    picks, baseline = result.picks, result.baseline
    rows = [row.id for row in result.trials if baseline and row.plan == baseline.plan and row.status == "ok"]
    if not rows or rows[0] in picks.recommended.tied_with:
        return result
    recommended, throughput = _add_tie(picks.recommended, rows[0]), picks.throughput
    if throughput.trial == recommended.trial and rows[0] not in throughput.tied_with:
        throughput = _add_tie(throughput, rows[0])  # the same plan for its speed as well: one set of ties
    search = dataclasses.replace(result.search, n_undecided=len(recommended.tied_with))
    picks = dataclasses.replace(picks, recommended=recommended, throughput=throughput)
    return dataclasses.replace(result, picks=picks, search=search)


def _add_tie(pick: Pick, tied_id: str) -> Pick:
    return dataclasses.replace(pick, tied_with=(*pick.tied_with, tied_id), rule=pick.rule + UNPROVEN)


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


def _explain_nulls(result: TuneResult, n_samples: int | None) -> dict[str, str]:
    """Say why figures are None, by dotted name."""
    no_rate = "the workload's learning rate could not be read"
    no_epoch = "the dataset has no length" if n_samples is None else "no throughput"
    picks, rate, epoch, summary = result.picks, result.learning_rate, result.epoch_seconds, result.search
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
        "baseline": (result.baseline, "the user's own plan was not run: the budget ended before it"),
        "verification": (result.verification, "it was not asked for; --verify trains both plans side by side"),
    }  # fmt: skip
    return {name: reason for name, (value, reason) in facts.items() if value is None}
