"""Make the result of a search from its rows: what was found, what it cost, and how far it can be trusted."""

import dataclasses
from collections.abc import Sequence

from fulltilt.records import Plan, Roof, Trial
from fulltilt.tuner.answer.advice import build_advice
from fulltilt.tuner.answer.doubts import check_ran, list_doubts
from fulltilt.tuner.answer.hints import find_hints, find_search_hints
from fulltilt.tuner.answer.lever_advice import Findings
from fulltilt.tuner.answer.picks import pick
from fulltilt.tuner.answer.result import SearchSummary, TuneResult, build_epoch_seconds
from fulltilt.tuner.answer.savings import build_savings
from fulltilt.tuner.picks.changes import plan_learning_rate
from fulltilt.tuner.picks.finalists import MEMORY_SAFETY_PCT
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.search import strategies
from fulltilt.tuner.search.proof import Proof
from fulltilt.tuner.search.search import Search


def select_rows(rows: Sequence[Trial], turns: Sequence[Trial], user_plan: Plan) -> list[Trial]:
    """Select the rows of the table, one a plan: that of a turn where one failed, for then the plan is not safe.

    The user's own plan keeps its whole run: it is what stays where nothing else is proven.
    """
    failed = {row.plan: row for row in turns if row.status != "ok" and row.plan != user_plan}
    return [failed.get(row.plan, row) for row in {row.plan: row for row in reversed(rows)}.values()][::-1]


def conclude(search: Search, proof: Proof, roofs: Sequence[Roof], roofs_missing: str) -> TuneResult:
    """Make the result: table, picks, what they save, and what keeps the figures from being taken at face value.

    Args:
        roofs_missing: Why there are no roofs, where there are none.

    Raises:
        NoPlanError: no row is ok, or the budget was gone before there was one.
    """
    aim, probe, space, session = search.question.aim, search.probe, search.space, search.session
    check_ran(session, space)
    table = select_rows(session.rows, session.turns, space.user_plan)
    baseline = next((row for row in table if row.plan == space.user_plan), None)
    picks = pick(table, proof, user_plan=space.user_plan, memory_limit_gib=search.memory_gib)
    chosen, n_samples = picks.recommended.trial, probe.facts.n_samples
    rate = plan_learning_rate(
        probe.workload.get("learning_rate"),
        user_plan=space.user_plan,
        plan=chosen.plan,
        rule=search.options.lr_rule,
        is_batch_free=space.effective_batch_size is None,
    )
    built = {key: value for key, value in probe.workload.items() if key not in ("name", "notes")}
    # What building the workload noted, without advice on levers that the search has varied since.
    kept = [note for note in probe.workload.get("notes", ()) if note.partition("=")[0] not in space.axes]
    summary = _summarize(search, proof, table)
    result = TuneResult(
        machine=dataclasses.replace(search.question.machine, roofs=tuple(roofs)),
        workload={"name": aim.name, "task": aim.config.task, **built},
        trials=tuple(table),
        picks=picks,
        search=summary,
        learning_rate=rate,
        epoch_seconds=build_epoch_seconds(picks.recommended, n_samples, proof.evidence.estimate_rate(space.user_plan)),
        user_plan=space.user_plan,
        baseline=baseline,
        repeats=tuple(session.turns),
        levers=proof.levers,
        probes=tuple(session.probes),
        hints=(*find_hints(chosen, search.memory_gib), *find_search_hints(table)),
        notes=(*session.journal.notes, *space.notes, *kept, *list_doubts(session, picks, summary, space)),
        folder=str(search.folder.path),
    )
    return _add_savings_and_advice(result, search, proof, roofs_missing)


def _add_savings_and_advice(result: TuneResult, search: Search, proof: Proof, roofs_missing: str) -> TuneResult:
    """Add what the plan saves and what would make it faster, and for every null of the result why it is one."""
    space, roofs = search.space, result.machine.roofs
    chosen = result.picks.recommended.trial
    savings, savings_reasons = build_savings(
        result.picks,
        baseline=result.baseline,
        before_samples_per_s=proof.evidence.estimate_rate(space.user_plan),
        n_samples=result.workload.get("n_samples"),
        n_epochs=search.question.aim.config.run.epochs,
        search_s=result.search.seconds + result.search.earlier_s,
    )
    found = Findings(
        recommended=chosen,
        rows=(*search.session.rows, *search.session.turns),
        probes=result.probes,
        roofs=roofs,
        axes=space.axes,
        facts=space.facts,
        tied={row.plan for row in result.trials if row.id in result.picks.recommended.tied_with},
    )
    advice, advice_reasons = build_advice(found)
    if roofs_missing and not roofs:
        advice_reasons["advice.roof"] = roofs_missing
    reasons = {**_explain_nulls(result, search.probe.facts.n_samples), **savings_reasons, **advice_reasons}
    return dataclasses.replace(result, savings=savings, advice=advice, null_reasons=reasons)


def _summarize(search: Search, proof: Proof, table: Sequence[Trial]) -> SearchSummary:
    space, session = search.space, search.session
    n_groups = len({row.group for row in session.turns if row.status == "ok"})
    return SearchSummary(
        strategy=strategies.name_strategy(search.options.strategy),
        grid_size=count_grid(space) + len(space.skipped),
        n_trials=len(table),
        n_end_to_end=sum(row.status != "skipped" for row in session.rows),
        n_out_of_memory=sum(row.status == "out_of_memory" for row in table),
        seconds=session.elapsed_s,
        earlier_s=session.earlier_s,
        n_skipped=sum(row.status == "skipped" for row in table),
        n_repeats=len(session.turns),
        n_groups=n_groups,
        stalled_pct=proof.evidence.stalled_pct if n_groups else None,
        takes_turns=all(row.turns != "whole" for row in session.turns),
        waits_passively=any(row.turns in ("passive", "pinned") for row in session.turns),
        n_resumed=session.n_resumed,
        n_probes=sum(row.kind != "memory" for row in session.probes),
        n_collapsed=space.n_combinations - count_grid(space) if space.axes else 0,
        memory_limit_gib=search.memory_gib,
        memory_safety_pct=MEMORY_SAFETY_PCT,
        stopped_by_budget=session.is_budget_spent,
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
        "search.stalled_pct": (summary.stalled_pct, "no plans took turns"),
        "search.memory_limit_gib": (summary.memory_limit_gib, "the memory of the device could not be read"),
        "baseline": (result.baseline, "the user's own plan was not run: the budget ended before it"),
        "verification": (result.verification, "it was not asked for; --verify trains both plans with the same seeds"),
    }  # fmt: skip
    return {name: reason for name, (value, reason) in facts.items() if value is None}
