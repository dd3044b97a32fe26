"""Two plans against each other in fresh trial processes, in turn, so that drift of the machine hits both alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fulltilt.records import Plan, Trial

RunPlan = Callable[[Plan], Trial]


def run_duel(first: Plan, second: Plan, run_plan: RunPlan, *, n_rounds: int) -> list[tuple[float, float]]:
    """Samples per second of both plans, a pair a round: A B, then B A.

    Raises:
        RuntimeError: a trial failed; there is no ratio then, and leaving the round out would flatter that plan.
    """
    pairs = []
    for number in range(n_rounds):
        order = (first, second) if number % 2 == 0 else (second, first)
        rates = {plan: _read_rate(run_plan(plan)) for plan in order}
        pairs.append((rates[first], rates[second]))
    return pairs


def compute_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """One ratio a round: the first plan's rate over the second's."""
    return [first / second for first, second in pairs]


def _read_rate(trial: Trial) -> float:
    if trial.status != "ok" or not trial.samples_per_s:
        raise RuntimeError(f"the trial of {describe_plan(trial.plan)} ended with {trial.status}: {trial.reason}")
    return trial.samples_per_s


def describe_plan(plan: Plan, levers: Sequence[str] = ()) -> str:
    """``batch_size=64 threads=2``; every lever when none is named."""
    return " ".join(f"{name}={plan[name]}" for name in levers or plan)


def find_differences(first: Plan, second: Plan) -> list[str]:
    """Levers in which two plans differ."""
    return [name for name in first if first[name] != second[name]]
