"""Compare two results of one kind: what differs, and which figures differ by more than their spread.

Two files were measured at two times, so nothing pairs their runs and no interval can take out what the machine did in
between. A difference is called only where both come from one machine, each side has independent runs, their interval
leaves out 0, and plans that ran in both searches do not show that the machine itself changed. Otherwise the figures
stand without a verdict, and with the reason.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.records import VERSION
from fulltilt.report.compare_sides import ONE_RUN, Figure, Side
from fulltilt.report.quality import find_direction, find_times_to_common_quality
from fulltilt.stats import MARGIN_PCT, Decision, decide, decide_apart

Differences = list[dict[str, Any]]  # each {"name", "a", "b"}

ALPHA = 0.05
MIN_COMMON_PLANS = 4
FIRST_PICK = "recommended"
SAME_MACHINE = ("hostname_hash", "cpu_model", "n_cores_usable", "devices", "device")
SAME_WORKLOAD = (
    "task", "model", "n_parameters", "n_samples", "data", "data.dataset", "optimizer", "device", "device_name",
)  # fmt: skip
"""Facts of a workload that decide its speed; its name, its learning rate and its epochs do not.

A search says its ``optimizer``. A training says ``optim.optimizer``, which is no such fact: recipes are compared by
their time to quality.
"""


def compare_sides(a: Side, b: Side) -> dict[str, Any]:
    """Build the document of ``fulltilt compare``: what differs, the plans lever by lever, and every figure of both.

    A figure stands with the geometric mean of its repetitions on either side, and with an interval of their ratio that
    is widened for the number of figures: all of them together are wrong in 5 %. Between two workloads no difference
    and no interval is given: they would tell how the workloads differ, not the plans.

    Raises:
        UsageError: the two are of different kinds, or of different benchmarks, or hold one and the same result.
    """
    _check_comparable(a, b)
    differences = {
        "machine": _list_differences(a.identity or {}, b.identity or {}),
        "versions": _list_differences(a.versions, b.versions),
        "workload": _list_differences(a.workload, b.workload),
    }
    is_same_work = not _name_decisive(differences["workload"], SAME_WORKLOAD)
    control = compute_control(a, b) if is_same_work else None
    refusal = _find_refusal(differences, control)
    theirs = {figure.name: figure for figure in b.figures}
    ours = dict.fromkeys(figure.name for figure in a.figures)
    pairs = [(figure, theirs[figure.name]) for figure in a.figures if figure.name in theirs]
    pairs += _pair_times_to_quality(a, b)
    pairs = [pair for pair in pairs if not _is_shown_already(pair[0].name.partition(": ")[0], a, b)]
    n_judged = sum(_find_obstacle(x, y) is None for x, y in pairs) or 1
    return {
        "version": VERSION,
        "kind": a.kind,
        "a": {"path": a.path, "name": a.name, "notes": a.notes},
        "b": {"path": b.path, "name": b.name, "notes": b.notes},
        "refusal": refusal,
        "differences": differences,
        "picks": [_compare_plans(name, a, b) for name in a.plans if name in b.plans],
        "control": control,
        "figures": [_compare_figures(x, y, refusal, 1 - ALPHA / n_judged, is_same_work) for x, y in pairs],
        "only_in": {
            "a": [name for name in ours if name not in theirs],
            "b": [name for name in theirs if name not in ours],
        },
        "margin_pct": MARGIN_PCT,
        "notes": _list_notes(a, b),
    }


def compute_control(a: Side, b: Side) -> dict[str, Any] | None:
    """Compare the plans that ran in both searches: how the machine changed. None with fewer than four of them."""
    common = [plan for plan in a.rates_by_plan if plan in b.rates_by_plan]
    if len(common) < MIN_COMMON_PLANS:
        return None
    before, after = ([side.rates_by_plan[plan] for plan in common] for side in (a, b))
    decision = decide(before, after, higher_is_better=True)
    return {"n_plans": len(common), "verdict": decision.verdict, **_describe_decision(decision)}


def _pair_times_to_quality(a: Side, b: Side) -> list[tuple[Figure, Figure]]:
    """Give the training seconds of both until they showed the quality that both reached, metric by metric."""
    pairs = []
    for metric, curve in a.curves.items():
        direction = find_direction(metric)
        if direction is None or metric not in b.curves:
            continue
        target, times = find_times_to_common_quality([curve, b.curves[metric]], is_rising=direction == "rising")
        name = f"training seconds to validation {metric} {target:.4g}"
        first, second = (Figure(name=name, samples=(seconds,), better="lower", **ONE_RUN) for seconds in times)
        pairs.append((first, second))
    return pairs


def _check_comparable(a: Side, b: Side) -> None:
    if a.kind != b.kind:
        raise UsageError(
            f"{a.path} is a result of {a.kind} and {b.path} one of {b.kind}; compare two results of one kind"
        )
    if a.kind == "benchmark" and a.name != b.name:
        raise UsageError(
            f"{a.path} is of the benchmark {a.name} and {b.path} of {b.name}; compare two of one benchmark"
        )
    if a.digest and a.digest == b.digest:
        both = a.path if a.path == b.path else f"{a.path} and {b.path}"
        raise UsageError(
            f"A and B are one and the same result ({both}): every figure equals itself, which says nothing of how runs "
            "differ; name two results"
        )


def _list_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Differences:
    return [{"name": name, "a": a.get(name), "b": b.get(name)} for name in {**a, **b} if a.get(name) != b.get(name)]


def _compare_plans(name: str, a: Side, b: Side) -> dict[str, Any]:
    levers = _list_differences(a.plans[name], b.plans[name])
    same_as = FIRST_PICK if _is_shown_already(name, a, b) else None
    return {"name": name, "changed": bool(levers), "levers": levers, "same_as": same_as}


def _list_notes(a: Side, b: Side) -> list[str]:
    """Warn where a larger effective batch makes more samples/s no faster learning."""
    notes = []
    for name in (FIRST_PICK, "run"):
        plans = [side.plans[name] for side in (a, b) if "batch_size" in side.plans.get(name, {})]
        batches = [plan["batch_size"] * (plan.get("accumulate") or 1) for plan in plans]
        if len(batches) == 2 and batches[0] != batches[1]:
            notes.append(
                f"{name}: the effective batch differs, {batches[0]} against {batches[1]}: more samples/s with a larger "
                "one need not learn faster"
            )
    return notes


def _is_shown_already(pick: str, a: Side, b: Side) -> bool:
    """Whether a pick is, on both sides, the recommended plan under another name."""
    return pick != FIRST_PICK and all(
        pick in side.plans and side.plans[pick] == side.plans.get(FIRST_PICK) for side in (a, b)
    )


def _find_refusal(differences: Mapping[str, Differences], control: Mapping[str, Any] | None) -> str | None:
    """Say why no figure of one can be held against the other's, if that is so."""
    if others := _name_decisive(differences["workload"], SAME_WORKLOAD):
        return f"two different workloads ({others})"
    if others := _name_decisive(differences["machine"], SAME_MACHINE):
        return f"measured on two machines ({others})"
    if control and control["verdict"] in ("faster", "slower") and not differences["versions"]:
        change = f"{abs(control['change_pct']):.1f} % {control['verdict']}"
        return (
            f"{control['n_plans']} plans that ran in both are {change} in B, with the same versions on the same "
            "machine: the machine changed between the two, not the plan"
        )
    return None


def _name_decisive(differences: Differences, names: Sequence[str]) -> str:
    return ", ".join(difference["name"] for difference in differences if difference["name"] in names)


def _find_obstacle(a: Figure, b: Figure) -> str | None:
    """Say why these two figures have no interval of their own."""
    if min(*a.samples, *b.samples) <= 0:
        return "a value is not above 0, so there is no ratio"
    if min(a.n_runs, b.n_runs) < 2:
        return "one run on a side says nothing about how runs differ; measure each several times, in turn"
    return None


def _compare_figures(
    a: Figure, b: Figure, refusal: str | None, confidence: float, is_same_work: bool
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": a.name,
        "a": a.value,
        "b": b.value,
        "statistic_a": a.statistic,
        "statistic_b": b.statistic,
        "shown_a": a.shown,
        "shown_b": b.shown,
        "change_pct": 100 * (b.value / a.value - 1) if is_same_work and a.value > 0 and b.value > 0 else None,
        "ci_pct": None,
        "confidence": None,
        "detectable_pct": None,
        "n_a": len(a.samples),
        "n_b": len(b.samples),
        "unit_of_replication": a.unit_of_replication,
        "better": a.better,
        "verdict": None,
        "reason": refusal or _find_obstacle(a, b),
    }
    if not is_same_work or min(len(a.samples), len(b.samples)) < 2 or min(*a.samples, *b.samples) <= 0:
        return row
    decision = decide_apart(a.samples, b.samples, confidence=confidence, higher_is_better=True)
    row |= _describe_decision(decision)
    if row["reason"] is None:
        row["verdict"] = _name_verdict(decision, a)
    return row


def _describe_decision(decision: Decision) -> dict[str, Any]:
    is_known = all(map(math.isfinite, decision.ci_pct))
    return {
        "change_pct": decision.effect_pct,
        "ci_pct": list(decision.ci_pct) if is_known else None,
        "confidence": decision.confidence,
        "detectable_pct": decision.detectable_pct if is_known else None,
    }


def _name_verdict(decision: Decision, figure: Figure) -> str:
    """Translate a decision that was made as if higher were better: "faster" means that the value is higher."""
    if decision.verdict not in ("faster", "slower"):
        return decision.verdict
    is_higher = decision.verdict == "faster"
    if figure.better is None:
        return "higher" if is_higher else "lower"
    return "better" if is_higher == (figure.better == "higher") else "worse"
