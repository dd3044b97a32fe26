"""Ask for fresh runs of the finalists, one after another in alternating order; the recommendation prefers them."""

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence

from fulltilt.records import Plan, Trial
from fulltilt.tuner.picks.undecided import Speed, compute_mean_log, compute_run_error
from fulltilt.tuner.search.session import REPEAT, Ask, Strategy

MIN_CONFIRM_ROUNDS = 2  # one run of a plan says nothing of how much another would differ
MAX_CONFIRM_ROUNDS = 3
AT_STAKE = 0.03  # of the logarithm of samples/s: what taking the wrong one of two finalists may cost


def confirm(candidates: Sequence[Plan], *, baseline: Ask | None = None) -> Strategy:
    """Yield requests to run the finalists again in alternating order (A B, then B A); receive each trial.

    Drift then hits them alike. From the second round on a plan that is clearly slower than the fastest leaves; rounds
    end when one is left, or when so little is at stake between those left that it does not matter.

    Args:
        baseline: The user's own plan; runs in the same rounds, so that the gain over it is a fair one.
    """
    runs: dict[Plan, list[Trial]] = {}
    comparison = _name_comparison([*candidates, *([baseline.plan] if baseline else [])])
    own = {} if baseline is None or baseline.plan in candidates else {baseline.plan: baseline}
    left = [*candidates, *own]
    for number in range(MAX_CONFIRM_ROUNDS):
        why = f"finalist, measured again (round {number + 1} of {MAX_CONFIRM_ROUNDS} at most)"
        wishes = [own.get(plan) or Ask(plan=plan, why=why, kind=REPEAT) for plan in left]
        together = tuple((wish.plan, wish.kind) for wish in wishes)
        for wish in wishes if number % 2 == 0 else reversed(wishes):
            trial = yield dataclasses.replace(wish, comparison=comparison, together=together)
            runs.setdefault(wish.plan, []).append(trial)
            together = ()
        runs = {plan: found for plan, found in runs.items() if all(run.status == "ok" for run in found)}
        left = [plan for plan in left if plan in runs]
        if number + 1 >= MIN_CONFIRM_ROUNDS:
            left = find_rivals({plan: runs[plan] for plan in left}, list(runs.values()))
        if len(left) < 2 and number + 1 >= MIN_CONFIRM_ROUNDS:
            return


def _name_comparison(plans: Sequence[Plan]) -> str:
    """Name a set of plans, so that a search goes on with the rounds of the same plans only."""
    text = "|".join(sorted(str(sorted(plan.items(), key=str)) for plan in set(plans)))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_rivals(finalists: Mapping[Plan, Sequence[Trial]], runs: Sequence[Sequence[Trial]]) -> list[Plan]:
    """Return the plans that may still be the fastest; one only where a wrong choice would cost little.

    Args:
        finalists: Plan → its runs so far, as many for each.
        runs: By plan, all runs side by side: they say how much runs differ here.
    """
    if not finalists:
        return []
    error = compute_run_error(runs)
    speeds = {
        plan: Speed(log_rate=compute_mean_log(found), error=error / math.sqrt(len(found)))
        for plan, found in finalists.items()
    }
    best = max(speeds, key=lambda plan: speeds[plan].log_rate)
    spare = {plan: _compute_spare(speeds[best], speed) for plan, speed in speeds.items()}
    rivals = [plan for plan in finalists if spare[plan] >= 0]
    at_stake = max((spare[plan] for plan in rivals if plan != best), default=0.0)
    return rivals if at_stake > AT_STAKE else [best]


def _compute_spare(best: Speed, speed: Speed) -> float:
    """Compute by how much a plan may be faster than the best one; below 0 it is clearly slower."""
    return best.compute_reach(speed) - (best.log_rate - speed.log_rate)
