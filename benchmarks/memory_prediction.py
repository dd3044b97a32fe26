"""Peak memory at a batch size that was not run, predicted from fake tensors and probes at small ones, beside the real.

Each case is a process of its own. Fake peaks of all batch sizes come first; then real peaks at batch sizes that double,
up to a quarter of the target and until one comes out as predicted (``_memory_steps``; a search has the points of its
device probes instead); then the memory model's prediction for the target is held against the real peak there.
Beside it: the fake peak as it is, the same real probes without fake points, and a straight line through the two
smallest batches.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._memory_cases import build_cases
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import Arm, Target, build_arm, compute_bounds, judge
from fulltilt.tuner.model.memory import MemoryCurve

NAME = "memory_prediction"
CLAIM = "Peak memory at four times the largest probed batch is predicted within 3 % (median) and 6 % (p95)."
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

QUICK_CASES = 4
CASE_TIMEOUT_S = 1200
FULL = "fake, corrected"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case came to."""

    case: str
    target: int
    measured_gib: float
    predicted_gib: dict[str, float]  # by strategy
    probed: list[int]
    n_probes_without_fake: int
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
        "Real probes per case, median: "
        f"{np.median([len(o.probed) for o in outcomes]):g} with fake points, "
        f"{np.median([o.n_probes_without_fake for o in outcomes]):g} without.",
    )
    return Findings(arms=tuple(arms), targets=_judge(outcomes), notes=notes)


def _run_case(name: str, target: int, device: str) -> Outcome:
    command = [sys.executable, "-m", "benchmarks._memory_probe", name, "--device", device]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=CASE_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    outcome = _predict(name, target, answer)
    print(_describe(outcome), file=sys.stderr, flush=True)
    return outcome


def _predict(name: str, target: int, answer: Mapping[str, Any]) -> Outcome:
    fake, real = ({int(batch): gib for batch, gib in answer[kind].items()} for kind in ("fake", "real"))
    persistent_gib = answer["persistent_gib"]
    pick = {kind: {b: real[b] for b in answer[kind]} for kind in ("probed", "probed_without_fake")}
    corrected = MemoryCurve(real=pick["probed"], fake=fake, persistent_gib=persistent_gib).predict_gib(target)
    without = MemoryCurve(real=pick["probed_without_fake"], persistent_gib=persistent_gib).predict_gib(target)
    (first, at_first), (second, at_second) = sorted(real.items())[:2]
    line = at_first + (at_second - at_first) / (second - first) * (target - first)
    return Outcome(
        case=name,
        target=target,
        measured_gib=real[target],
        predicted_gib={
            FULL: corrected.gib,
            "fake alone": fake[target],
            "probes alone": without.gib,
            "two-point line": line,
        },
        probed=answer["probed"],
        n_probes_without_fake=len(answer["probed_without_fake"]),
        is_inside=corrected.low * 0.999 <= real[target] <= corrected.high * 1.001,
        fake_s=answer["fake_s"],
    )


def _build_strategy_arms(outcomes: list[Outcome]) -> list[Arm]:
    unit = "case: model, optimizer and levers"
    arms = [
        build_arm(
            [abs(o.compute_error_pct(strategy)) for o in outcomes],
            case="all cases",
            arm=strategy,
            metric="abs_error_pct",
            unit_of_replication=unit,
        )
        for strategy in outcomes[0].predicted_gib
    ]
    seconds = [float(np.median(o.fake_s)) for o in outcomes]
    cost = build_arm(seconds, case="all cases", arm="one fake point", metric="seconds", unit_of_replication=unit)
    return [*arms, cost]


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


def _judge(outcomes: list[Outcome]) -> tuple[Target, ...]:
    errors = [abs(o.compute_error_pct(FULL)) for o in outcomes]
    median, p95 = float(np.median(errors)), float(np.quantile(errors, 0.95))
    return (
        judge("median error, pct", median, compute_bounds(errors), at_most=3.0),
        judge("p95 error, pct", p95, compute_bounds(errors, 0.95), at_most=6.0),
    )


def _describe(outcome: Outcome) -> str:
    errors = ", ".join(f"{name} {outcome.compute_error_pct(name):+.1f} %" for name in outcome.predicted_gib)
    probed = ", ".join(map(str, outcome.probed))
    return f"{outcome.case}: {outcome.measured_gib:.3f} GiB at {outcome.target}; probed {probed}; {errors}"
