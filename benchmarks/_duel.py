"""Plans in fresh trial processes: one after the other, or two that take turns, so that drift hits both alike."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.records import Plan, Trial, TrialRequest
from fulltilt.tuner import ProcessTarget
from fulltilt.tuner.question.source import TuneTarget
from fulltilt.tuner.trials.target import Target

RunPlan = Callable[[Plan], Trial]


@contextlib.contextmanager
def open_target(aim: TuneTarget, folder: Path, *, device: str, max_measure_s: float) -> Iterator[ProcessTarget]:
    """Yield what runs plans in fresh trial processes, set up as a search sets up its own."""
    usual = TrialRequest(
        source=aim.source,
        device=device,
        n_steps=aim.config.benchmark.steps_per_test,
        seed=aim.config.run.seed,
        max_measure_s=max_measure_s,
    )
    with contextlib.closing(ProcessTarget(usual, folder)) as target:
        yield target


@contextlib.contextmanager
def open_runner(aim: TuneTarget, folder: Path, *, why: str, **told: Any) -> Iterator[RunPlan]:
    """Yield a function that runs one plan; ``told`` is as in ``open_target``."""
    numbers = itertools.count(1)
    with open_target(aim, folder, **told) as target:
        yield lambda plan: target(plan, id=f"m{next(numbers)}", why=why)


def run_duel(first: Plan, second: Plan, target: Target, *, n_groups: int) -> list[tuple[float, float]]:
    """Return samples per second of both plans, a pair for each group of fresh processes that take turns.

    Raises:
        RuntimeError: a process failed; there is no ratio then, and leaving the group out would flatter that plan.
    """
    pairs = []
    for number in range(n_groups):
        plans = {f"g{number}-first": first, f"g{number}-second": second}
        rows = target.run_group(plans, why="in turn with the other")
        rates = {row.plan: _read_rate(row) for row in rows}
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
