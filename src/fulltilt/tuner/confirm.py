"""Finalists measured again in fresh processes, side by side: the only comparison that a recommendation rests on."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from fulltilt.records import Plan, Trial
from fulltilt.tuner.session import REPEAT, Ask, Strategy

MIN_CONFIRM_ROUNDS = 2  # one run of a plan says nothing of how much another would differ
MAX_CONFIRM_ROUNDS = 3
CLEAR = 2.0  # standard errors
AT_STAKE = 0.03  # of the logarithm of samples/s: what taking the wrong one of two finalists may cost
PRIOR_SPREAD = 0.01  # of the logarithm: what processes of one plan differ by; 0.6 % on a quiet machine, drift on top
PRIOR_DF = 4  # degrees of freedom that the prior counts for: as much as three rounds of two plans tell


def confirm(
    candidates: Sequence[Plan], *, max_rounds: int = MAX_CONFIRM_ROUNDS, baseline: Ask | None = None
) -> Strategy:
    """Run the finalists again in fresh processes, interleaved (A B, then B A), so that drift hits them alike.

    From the second round on a plan that is clearly slower than the fastest leaves; rounds end when one is left, or when
    so little is at stake between those left that it does not matter.

    Args:
        baseline: The user's own plan; runs in the same rounds, so that the gain over it is a fair one.
    """
    runs: dict[Plan, list[Trial]] = {}
    comparison = _name_comparison([*candidates, *([baseline.plan] if baseline else [])])
    own = {} if baseline is None or baseline.plan in candidates else {baseline.plan: baseline}
    left = [*candidates, *own]
    for number in range(max_rounds):
        why = f"finalist, measured again (round {number + 1} of {max_rounds} at most)"
        for plan in left if number % 2 == 0 else reversed(left):
            wish = own.get(plan) or Ask(plan=plan, why=why, kind=REPEAT)
            trial = yield dataclasses.replace(wish, comparison=comparison)
            runs.setdefault(plan, []).append(trial)
        runs = {plan: found for plan, found in runs.items() if all(run.status == "ok" for run in found)}
        left = [plan for plan in left if plan in runs]
        if number + 1 >= MIN_CONFIRM_ROUNDS:
            left = find_rivals({plan: runs[plan] for plan in left}, list(runs.values()))
        if len(left) < 2 and number + 1 >= MIN_CONFIRM_ROUNDS:
            return


def _name_comparison(plans: Sequence[Plan]) -> str:
    """The same for the same plans: a search that goes on after a kill takes up its rounds, one with others does not."""
    text = "|".join(sorted(str(sorted(plan.items(), key=str)) for plan in set(plans)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_rivals(finalists: Mapping[Plan, Sequence[Trial]], runs: Sequence[Sequence[Trial]]) -> list[Plan]:
    """The plans that may still be the fastest; one only where less is at stake than a tie may cost.

    Args:
        finalists: Plan → its runs so far, as many for each.
        runs: By plan, all runs side by side: they say how much runs differ here.
    """
    if not finalists:
        return []
    means = {plan: _compute_mean_log(found) for plan, found in finalists.items()}
    best = max(means, key=means.__getitem__)
    reach = CLEAR * math.sqrt(2 / len(finalists[best])) * compute_run_error(runs)
    rivals = [plan for plan in finalists if means[best] - means[plan] <= reach]
    at_stake = max((reach - (means[best] - means[plan]) for plan in rivals if plan != best), default=0.0)
    return rivals if at_stake > AT_STAKE else [best]


def compute_run_error(runs: Sequence[Sequence[Trial]]) -> float:
    """Standard error of the logarithm of one run's samples/s on this machine.

    What runs of one plan differ by, or what the blocks of a run differ by, whichever is larger.

    Args:
        runs: By plan, its runs with status ok.
    """
    logs = [np.log([run.samples_per_s or math.nan for run in found]) for found in runs]
    squares = sum(float(((x - x.mean()) ** 2).sum()) for x in logs)
    between = (PRIOR_DF * PRIOR_SPREAD**2 + squares) / (PRIOR_DF + sum(len(x) - 1 for x in logs))
    within = float(np.mean([_estimate_error(run) ** 2 for found in runs for run in found]))
    return math.sqrt(max(between, within))


def _compute_mean_log(runs: Sequence[Trial]) -> float:
    return float(np.mean(np.log([run.samples_per_s or math.nan for run in runs])))


def _estimate_error(run: Trial) -> float:
    """Standard error of the logarithm of a run's samples/s, from its own interval."""
    if run.samples_per_s_ci95 is None or min(run.samples_per_s_ci95) <= 0:
        return PRIOR_SPREAD
    low, high = run.samples_per_s_ci95
    return math.log(high / low) / (2 * 1.96)
