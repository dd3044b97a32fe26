"""Why a search on a simulated machine ended where it did, in words for whoever works on the strategy."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks._machines_score import Score, Truths
from fulltilt.records import WHOLE_RUNS, Plan, Trial


def explain(truths: Truths, score: Score) -> list[str]:
    """Say what bounds the best plan and the recommended one, and which stage lost the best plan."""
    best, chosen = truths.best, score.recommended
    lines = [
        f"{truths.machine.describe()}: regret {score.regret_pct:.1f} % ({score.n_trials} trials)",
        f"  best        {_describe(truths, best)}",
    ]
    if chosen is None:
        return [*lines, "  recommended nothing: no plan ran"]
    differs = ", ".join(f"{name} {chosen[name]}" for name in truths.space.axes if chosen[name] != best[name])
    lines.append(f"  recommended {_describe(truths, chosen)}; differs in {differs or 'nothing'}")
    return [*lines, f"  missed by   {_find_miss(truths, score)}"]


def _find_miss(truths: Truths, score: Score) -> str:
    rows = [row for row in score.rows if row.plan == truths.best and row.kind in WHOLE_RUNS]
    if any(row.kind != "end_to_end" for row in rows):
        return "the pick: the best plan was a finalist and lost to noise or to the rule for ties"
    if rows:
        off_pct = 100 * (rows[0].samples_per_s or 0.0) / truths.best_samples_per_s - 100
        return f"noise: the best plan ran once at {off_pct:+.1f} % of its true speed"
    loader_only = ("num_workers", "pin_memory")
    names = {
        "device": [name for name in truths.space.axes if name not in loader_only],
        "loader": [name for name in truths.space.axes if name in ("batch_size", *loader_only)],
    }
    said = "; ".join(f"nearest {kind} probe: {_find_nearest(truths, score, kind, of)}" for kind, of in names.items())
    return f"the prediction: the best plan was never run; {said}"


def _find_nearest(truths: Truths, score: Score, kind: str, names: Sequence[str]) -> str:
    """Say in what the probe of a kind that shares most with the best plan differs from it."""
    best, plans = truths.best, [row.plan for row in score.rows if row.kind == kind]
    if not plans:
        return "none"
    nearest = min(plans, key=lambda plan: sum(plan[name] != best[name] for name in names))
    differs = ", ".join(f"{name} {nearest[name]}" for name in names if nearest[name] != best[name])
    return f"with {differs}" if differs else "at the plan itself"


def _describe(truths: Truths, plan: Plan) -> str:
    """Write the true speed and the axes of a plan, and the speed of its parts as multiples of the whole."""
    values = " ".join(f"{name}={plan[name]}" for name in truths.space.axes)
    whole = truths.samples_per_s.get(plan)
    if whole is None:
        return f"0/s {values}; does not fit"
    steps_s = {kind: truths.machine.find_truths([plan], kind=kind)[0].step_s for kind in ("device", "loader")}
    parts = (f"{kind} alone {plan['batch_size'] / step_s / whole:.2f}×" for kind, step_s in steps_s.items())
    return f"{whole:.4g}/s {values}; {', '.join(parts)}"


def describe_row(row: Trial, axes: Sequence[str]) -> str:
    values = " ".join(str(row.plan[name]) for name in axes)
    figure = row.status if row.samples_per_s is None else f"{row.samples_per_s:.5g}/s"
    memory = "" if row.memory_allocated_peak_gib is None else f" {row.memory_allocated_peak_gib:.2f} GiB"
    return f"  {row.id:>5} {row.kind:<10} {values:<40} {figure}{memory}  {row.why}"
