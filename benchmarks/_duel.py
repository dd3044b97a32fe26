"""Two plans against each other in fresh trial processes, in turn, so that drift of the machine hits both alike."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.records import Plan, Trial, TrialRequest
from fulltilt.tuner import ProcessTarget
from fulltilt.tuner.question.source import TuneTarget

RunPlan = Callable[[Plan], Trial]


@contextlib.contextmanager
def open_runner(aim: TuneTarget, folder: Path, *, device: str, max_measure_s: float, why: str) -> Iterator[RunPlan]:
    """Yield a function that runs one plan in a fresh trial process, set up as a search sets up its own."""
    usual = TrialRequest(
        source=aim.source,
        device=device,
        n_steps=aim.config.benchmark.steps_per_test,
        seed=aim.config.run.seed,
        max_measure_s=max_measure_s,
    )
    target = ProcessTarget(usual, folder)
    numbers = itertools.count(1)
    try:
        yield lambda plan: target(plan, id=f"m{next(numbers)}", why=why)
    finally:
        target.close()


def run_duel(first: Plan, second: Plan, run_plan: RunPlan, *, n_rounds: int) -> list[tuple[float, float]]:
    """Return samples per second of both plans, a pair a round: A B, then B A.

    Raises:
        RuntimeError: a trial failed; there is no ratio then, and leaving the round out would flatter that plan.
    """
    pairs = []
    for number in range(n_rounds):
        order = (first, second) if number % 2 == 0 else (second, first)
        rates = {plan: _read_rate(run_plan(plan)) for plan in order}
        pairs.append((rates[first], rates[second]))
    return pairs


def _read_rate(trial: Trial) -> float:
    if trial.status != "ok" or not trial.samples_per_s:
        raise RuntimeError(f"the trial of {describe_plan(trial.plan)} ended with {trial.status}: {trial.reason}")
    return trial.samples_per_s


def span_axes(
    batch_sizes: Sequence[int], num_workers: Sequence[int], levers: Mapping[str, Any], *, device: str, n_steps: int
) -> dict[str, Any]:
    """Return the settings whose space has these axes and no other, in fp32."""
    return {
        "run.device": device,
        "speed.precision": "fp32",
        # Two threads on two cores wait for each other whenever anything else runs.
        "speed.threads": 1 if device == "cpu" else None,
        "benchmark.batch_sizes": list(batch_sizes),
        "benchmark.num_workers_options": list(num_workers),
        "benchmark.steps_per_test": n_steps,
        "benchmark.test_mixed_precision": False,
        "benchmark.test_pin_memory": False,
        "benchmark.levers": dict(levers),
    }


def describe_plan(plan: Plan, levers: Sequence[str] = ()) -> str:
    """Write ``batch_size=64 threads=2``; every lever when none is named."""
    return " ".join(f"{name}={plan[name]}" for name in levers or plan)
