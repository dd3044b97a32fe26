"""Peak memory at a batch size that was not run, predicted from fake tensors and probes at small ones, beside the real.

Each case is a process of its own. Fake peaks of all batch sizes come first; then real peaks at batch sizes that double,
up to a quarter of the target and until one comes out as predicted (``_memory_probe``); then the memory model's
prediction for the target is held against the real peak there. Beside it: the fake peak as it is, and a straight line
through the two smallest batches. Intervals draw whole models anew, for the settings of one model err alike.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks._child import call_in_process
from benchmarks._memory_cases import MODELS, build_cases
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, compute_bounds, judge
from fulltilt.errors import format_nearest
from fulltilt.tuner.search.model.memory import MemoryCurve

CLAIM = "Peak memory at four times the largest probed batch is predicted within 3 % (median) and 6 % (p95)."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

QUICK_CASES = 4
CASE_TIMEOUT_S = 1200
FULL = "fake, corrected"
ALL_CASES = "all cases"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case came to."""

    case: str
    target: int
    measured_gib: float
    predicted_gib: dict[str, float]  # by strategy
    probed: list[int]
    is_inside: bool  # the measured peak lies between the low and the high of the prediction
    fake_s: list[float]

    def compute_error_pct(self, strategy: str) -> float:
        return 100 * (self.predicted_gib[strategy] / self.measured_gib - 1)


def run(context: Context) -> Findings:
    cases = build_cases()[: QUICK_CASES if context.quick else None]
    outcomes = [_run_case(case.name, case.target, context.device) for case in cases]
    arms = [*_build_strategy_arms(outcomes), *_build_case_arms(outcomes)]
    notes = (
        "Measured: on a CPU the allocator's own events (torch.profiler), on a GPU torch.cuda.max_memory_allocated; two "
        "training steps and an evaluation step.",
        f"The measured peak lies inside the predicted interval in {sum(o.is_inside for o in outcomes)} of "
        f"{len(outcomes)} cases.",
        f"Real probes per case, median: {np.median([len(o.probed) for o in outcomes]):g}.",
    )
    return Findings(arms=tuple(arms), targets=_judge(arms), notes=notes)


def _run_case(name: str, target: int, device: str) -> Outcome:
    answer = call_in_process(
        "benchmarks._memory_probe:probe", {"name": name, "device": device}, timeout_s=CASE_TIMEOUT_S
    )
    outcome = _predict(name, target, answer)
    print(_describe(outcome), file=sys.stderr, flush=True)
    return outcome


def _predict(name: str, target: int, answer: Mapping[str, Any]) -> Outcome:
    fake, real = ({int(batch): gib for batch, gib in answer[kind].items()} for kind in ("fake", "real"))
    probed = {batch: real[batch] for batch in answer["probed"]}
    corrected = MemoryCurve(real=probed, fake=fake, persistent_gib=answer["persistent_gib"]).predict_gib(target)
    (first, at_first), (second, at_second) = sorted(real.items())[:2]
    line = at_first + (at_second - at_first) / (second - first) * (target - first)
    return Outcome(
        case=name,
        target=target,
        measured_gib=real[target],
        predicted_gib={FULL: corrected.gib, "fake alone": fake[target], "two-point line": line},
        probed=answer["probed"],
        is_inside=corrected.low * 0.999 <= real[target] <= corrected.high * 1.001,
        fake_s=answer["fake_s"],
    )


def _build_strategy_arms(outcomes: list[Outcome]) -> list[Arm]:
    columns = {
        (strategy, "abs_error_pct"): [abs(o.compute_error_pct(strategy)) for o in outcomes]
        for strategy in outcomes[0].predicted_gib
    }
    columns["one fake point", "seconds"] = [float(np.median(o.fake_s)) for o in outcomes]
    unit, clusters = "model, under each setting that applies to it", [find_model(o.case) for o in outcomes]
    return [
        build_arm(values, case=ALL_CASES, arm=arm, metric=metric, unit_of_replication=unit, clusters=clusters)
        for (arm, metric), values in columns.items()
    ]


def find_model(case: str) -> str:
    """Return the model of a case, as the settings of one model err alike, some to the last bit.

    Raises:
        LookupError: no model of ``MODELS`` has such a case.
    """
    for model in MODELS:
        if case.startswith(f"{model.name}, "):
            return model.name
    raise LookupError(f"case {case!r} begins with no model's name; {format_nearest(case, [m.name for m in MODELS])}")


def _build_case_arms(outcomes: list[Outcome]) -> list[Arm]:
    return [
        build_arm(
            [o.compute_error_pct(FULL)],
            case=o.case,
            arm=FULL,
            metric="error_pct",
            unit_of_replication="target batch size",
            note=_describe(o),
        )
        for o in outcomes
    ]


def _judge(arms: Sequence[Arm]) -> tuple[Target, ...]:
    errors = next(arm for arm in arms if (arm.case, arm.arm) == (ALL_CASES, FULL))
    p95 = float(np.quantile(errors.samples, 0.95))
    bounds = compute_bounds(errors.samples, 0.95, clusters=errors.clusters)
    return (
        judge("median error, pct", errors.median, errors.ci95, at_most=3.0),
        judge("p95 error, pct", p95, bounds, at_most=6.0),
    )


def _describe(outcome: Outcome) -> str:
    errors = ", ".join(f"{name} {outcome.compute_error_pct(name):+.1f} %" for name in outcome.predicted_gib)
    probed = ", ".join(map(str, outcome.probed))
    return f"{outcome.case}: {outcome.measured_gib:.3f} GiB at {outcome.target}; probed {probed}; {errors}"
