"""Finalists measured again in fresh processes, side by side: the only comparison that a recommendation rests on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fulltilt.records import Plan, Trial
from fulltilt.tuner.session import REPEAT, Ask, Strategy

MIN_CONFIRM_ROUNDS = 2  # one run of a plan says nothing of how much another would differ
MAX_CONFIRM_ROUNDS = 3
CLEAR = 2.0  # standard errors
AT_STAKE = 0.01  # of the logarithm of samples/s: what taking the wrong one of two finalists may cost
PRIOR_SPREAD, PRIOR_DF = (
    0.01,
    4,
)  # how much processes of one plan differ (0.6 % on a quiet machine), and how sure that is


def confirm(
    candidates: Sequence[Plan], *, max_rounds: int = MAX_CONFIRM_ROUNDS, baseline: Ask | None = None
) -> Strategy:
    """Run the finalists again in fresh processes, interleaved (A B, then B A), so that drift hits them alike.

    Rounds end when another could hardly change what is said: the gap between the two fastest is clear, or so little
    is at stake that it does not matter.

    Args:
        baseline: The user's own plan; runs in the same rounds, so that the gain over it is a fair one.
    """
    runs: dict[Plan, list[Trial]] = {}
    for number in range(max_rounds):
        why = f"finalist, measured again (round {number + 1} of {max_rounds} at most)"
        asked = [Ask(plan=plan, why=why, kind=REPEAT) for plan in candidates]
        if baseline is not None and baseline.plan not in candidates:
            asked.append(baseline)
        for wish in asked if number % 2 == 0 else reversed(asked):
            trial = yield wish
            if trial.status == "ok":
                runs.setdefault(trial.plan, []).append(trial)
        if number + 1 >= MIN_CONFIRM_ROUNDS and is_settled(list(runs.values())):
            return


def is_settled(runs: Sequence[Sequence[Trial]]) -> bool:
    """Whether rounds so far tell the fastest plan from the next, or leave less than 1 % at stake.

    A run's error is what processes of one plan differ by, or what its own blocks differ by, whichever is larger.

    Args:
        runs: By plan, its runs in the rounds.
    """
    if len(runs) < 2:
        return True
    logs = [np.log([run.samples_per_s or math.nan for run in found]) for found in runs]
    squares = sum(float(((x - x.mean()) ** 2).sum()) for x in logs)
    between = (PRIOR_DF * PRIOR_SPREAD**2 + squares) / (PRIOR_DF + sum(len(x) - 1 for x in logs))
    within = float(np.mean([_estimate_error(run) ** 2 for found in runs for run in found]))
    error = math.sqrt(2 * max(between, within) / min(len(found) for found in runs))
    best, second = sorted((float(x.mean()) for x in logs), reverse=True)[:2]
    return best - second > CLEAR * error or CLEAR * error - (best - second) < AT_STAKE


def _estimate_error(run: Trial) -> float:
    """Standard error of the logarithm of a run's samples/s, from its own interval."""
    if run.samples_per_s_ci95 is None or min(run.samples_per_s_ci95) <= 0:
        return PRIOR_SPREAD
    low, high = run.samples_per_s_ci95
    return math.log(high / low) / (2 * 1.96)
