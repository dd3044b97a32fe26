"""Why a search on a simulated machine ended where it did, in words for whoever works on the strategy."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._machines_score import Score, Truths
from fulltilt.records import WHOLE_RUNS, Plan, Trial


def explain(truths: Truths, score: Score) -> list[str]:
    """Why one search ended where it did: what bounds the best plan, and what the search knew of it."""
    machine, best = truths.machine, truths.best
    lines = [f"{machine.describe()}: regret {score.regret_pct:.1f} % ({score.n_trials} trials)"]
    lines.append(f"  best        {_describe(truths, best)}; {_describe_bound(truths, best)}")
    if score.recommended is None:
        return [*lines, "  recommended nothing: no plan ran"]
    differs = ", ".join(f"{k} {score.recommended[k]}" for k in truths.space.axes if score.recommended[k] != best[k])
    own = f"{_describe(truths, score.recommended)}; {_describe_bound(truths, score.recommended)}"
    lines.append(f"  recommended {own}; differs in {differs or 'nothing'}")
    return [*lines, f"  missed by   {_find_miss(truths, score)}"]


def _find_miss(truths: Truths, score: Score) -> str:
    """The stage that lost the best plan."""
    best = truths.best
    rows = [row for row in score.rows if row.plan == best and row.kind in WHOLE_RUNS]
    if any(row.kind != "end_to_end" for row in rows):
        return "the pick: the best plan was a finalist and lost to noise or to the rule for ties"
    if rows:
        seen = rows[0].samples_per_s or 0.0
        return (
            f"noise: the best plan ran once at {100 * seen / truths.best_samples_per_s - 100:+.1f} % of its true speed"
        )
    probes = {kind: _measure_nearest(truths, score, kind) for kind in ("device", "loader")}
    said = "; ".join(f"nearest {kind} probe: {text}" for kind, text in probes.items())
    return f"the prediction: the best plan was never run; {said}"


def _measure_nearest(truths: Truths, score: Score, kind: str) -> str:
    """The probe of a kind that shares most with the best plan, and in what it differs."""
    best = truths.best
    names = [n for n in truths.space.axes if (n in ("batch_size", "num_workers", "pin_memory")) or kind == "device"]
    names = [n for n in names if kind != "device" or n not in ("num_workers", "pin_memory")]
    probes = [row for row in score.rows if row.kind == kind]
    if not probes:
        return "none"
    row = min(probes, key=lambda row: sum(row.plan[n] != best[n] for n in names))
    differs = ", ".join(f"{n} {row.plan[n]}" for n in names if row.plan[n] != best[n])
    return f"with {differs}" if differs else "at the plan itself"


def _describe(truths: Truths, plan: Plan) -> str:
    values = " ".join(f"{name}={plan[name]}" for name in truths.space.axes)
    return f"{truths.samples_per_s.get(plan, 0.0):.4g}/s {values}"


def _describe_bound(truths: Truths, plan: Plan) -> str:
    """True speed of the parts, as multiples of the whole."""
    whole = truths.samples_per_s.get(plan)
    if whole is None:
        return "does not fit"
    parts = []
    for kind in ("device", "loader"):
        step_s = truths.machine.find_truths([plan], kind=kind)[0].step_s
        parts.append(f"{kind} alone {plan['batch_size'] / step_s / whole:.2f}×")
    return ", ".join(parts)


def describe_row(row: Trial, axes: Sequence[str]) -> str:
    values = " ".join(str(row.plan[name]) for name in axes)
    figure = row.status if row.samples_per_s is None else f"{row.samples_per_s:.5g}/s"
    memory = "" if row.memory_allocated_peak_gib is None else f" {row.memory_allocated_peak_gib:.2f} GiB"
    return f"  {row.id:>5} {row.kind:<10} {values:<40} {figure}{memory}  {row.why}"
