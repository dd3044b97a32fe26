"""Add what a result says beyond its rows when the search is over: savings and advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from fulltilt.levers import Facts
from fulltilt.tuner.answer.advice import build_advice
from fulltilt.tuner.answer.lever_advice import Findings
from fulltilt.tuner.answer.result import TuneResult
from fulltilt.tuner.answer.savings import build_savings
from fulltilt.tuner.picks.picks import Pick

UNPROVEN = "; its pairs of runs do not prove the settings as they were slower: a tie too"


def finish_result(
    result: TuneResult,
    *,
    axes: Mapping[str, Sequence[object]],
    facts: Facts,
    n_epochs: int | None,
    roofs_missing: str | None = None,
) -> TuneResult:
    """Add savings and advice, each with the reasons for what is missing. Measures nothing.

    Args:
        result: With its rows, probes and picks; roofs measured in the search stand under ``machine.roofs``.
        axes: Lever → values that the search could try.
        facts: What guards may know of workload and machine.
        n_epochs: Of the configured run; None when it has no such length.
        roofs_missing: Why no roof was measured.
    """
    chosen, search = result.picks.recommended.trial, result.search
    rows = [*result.trials, *result.repeats, *([result.baseline] if result.baseline else [])]
    runs = list({row.id: row for row in rows}.values())
    savings, savings_reasons = build_savings(
        runs,
        baseline=result.baseline,
        recommended=chosen,
        n_samples=result.workload.get("n_samples"),
        n_epochs=n_epochs,
        search_s=search.seconds + search.earlier_s,
    )
    if savings is not None and savings.verdict == "no gain":
        result = tie_with_baseline(result)
    found = Findings(
        recommended=chosen,
        rows=runs,
        probes=result.probes,
        roofs=result.machine.roofs,
        axes=axes,
        facts=facts,
        noise_pct=search.noise_pct,
        tied={row.plan for row in runs if row.id in result.picks.recommended.tied_with},
    )
    advice, advice_reasons = build_advice(found)
    if roofs_missing and not result.machine.roofs:
        advice_reasons["advice.roof"] = roofs_missing
    reasons = {**result.null_reasons, **savings_reasons, **advice_reasons}
    if result.verification is None:
        reasons["verification"] = "it was not asked for; --verify trains both plans side by side"
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
