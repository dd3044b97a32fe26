"""The plan that the default search recommends, against the fastest of the whole grid, on three workloads.

Both searches run over the same space. Their winners then take turns in groups of fresh processes: the grid's winner is
the best of many noisy rows, and a second measurement takes that luck away.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._duel import describe_plan, open_target, run_duel, span_axes
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge
from fulltilt.data import make_sensor_hdf5
from fulltilt.records import Trial
from fulltilt.tuner import TuneResult, tune
from fulltilt.tuner.question.source import resolve_target

CLAIM = "The recommended plan runs at 0.97 or more of the speed of the fastest plan of the whole grid."
NEEDS_PEERS = False
DEVICES = ("cpu",)

LIMIT_RATIO = 0.97
MAX_MEASURE_S = 8.0  # of a trial, as the default search has it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is tuned, and the settings that span its space."""

    name: str
    target: str
    settings: Mapping[str, Any]
    axes: tuple[str, ...]  # levers that vary


def list_workloads(folder: Path) -> list[Workload]:
    """Return three of at most 24 plans each, bound by small convolutions, by the step itself, and by attention."""
    span = functools.partial(span_axes, num_workers=[0, 1], device="cpu", n_steps=10)
    sensor_file = make_sensor_hdf5(folder / "sensors.h5", 2048, 64, seed=0)
    return [
        Workload(
            name="digits, small CNN",
            target=str(ROOT / "configs" / "digits.yaml"),
            settings=span([32, 128, 512], levers={"channels_last": [False, True]}),
            axes=("batch_size", "num_workers", "channels_last"),
        ),
        Workload(
            name="digits as rows, MLP",
            target="benchmarks._tabular:workload",
            settings=span([32, 128, 512], levers={"fused_optimizer": [False, True]}),
            axes=("batch_size", "num_workers", "fused_optimizer"),
        ),
        Workload(
            name="sensors, diffusion",
            target=str(ROOT / "configs" / "checking_gpu_optimization.yaml"),
            settings={
                **span([8, 32, 128], levers={"threads": [1, 2]}),
                "model": "sensor_transformer(depth=1, hidden=16, heads=2)",
                "data.path": str(sensor_file),
                "data.pin_memory": False,
            },
            axes=("batch_size", "num_workers", "threads"),
        ),
    ]


def run(context: Context) -> Findings:
    arms: list[Arm] = []
    targets: list[Target] = []
    notes = [
        "grid: tune --exhaustive; search: tune with its defaults; both on the same axes, in folders of their own",
        "the grid's best is the row with the most samples/s, without a tie rule; the search's is its recommended pick",
    ]
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        workloads = list_workloads(Path(folder))
        for workload in workloads[:1] if context.quick else workloads:
            found, judged, said = compare_workload(workload, Path(folder), n_groups=2 if context.quick else 16)
            arms += found
            targets.append(judged)
            notes.append(said)
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=tuple(notes))


def compare_workload(workload: Workload, folder: Path, *, n_groups: int) -> tuple[list[Arm], Target, str]:
    """Search twice, then set the two winners against each other. Cost: grid, search and ``n_groups`` groups."""
    stem = workload.name.replace(" ", "-").replace(",", "")
    results = {
        "grid": tune(workload.target, settings=workload.settings, exhaustive=True, out=folder / f"{stem}-grid"),
        "search": tune(workload.target, settings=workload.settings, out=folder / f"{stem}-search"),
    }
    arms = [arm for name, result in results.items() for arm in describe_search(workload.name, name, result)]
    best = find_fastest(results["grid"].trials).plan
    recommended = results["search"].picks.recommended.trial.plan
    plans = (
        f"{workload.name}: the grid's best is {describe_plan(best, workload.axes)}, recommended is "
        f"{describe_plan(recommended, workload.axes)}"
    )
    name = f"{workload.name}: recommended over best"
    if recommended == best:
        judged = judge(name, 1.0, None, at_least=LIMIT_RATIO, note="same plan")
        return arms, judged, f"{plans}: the same plan, not measured again"
    aim = resolve_target(workload.target, workload.settings)
    with open_target(aim, folder / f"{stem}-duel", device="cpu", max_measure_s=MAX_MEASURE_S) as target:
        pairs = run_duel(recommended, best, target, n_groups=n_groups)
    arms += describe_duel(workload.name, pairs)
    ratio = arms[-1]
    judged = judge(name, ratio.median, ratio.ci95, at_least=LIMIT_RATIO)
    differing = [name for name in best if best[name] != recommended[name]]
    return arms, judged, f"{plans}; they differ in {', '.join(differing)}"


def find_fastest(trials: Sequence[Trial]) -> Trial:
    """Return the ok row with the most samples per second."""
    return max((trial for trial in trials if trial.status == "ok"), key=lambda trial: trial.samples_per_s or 0.0)


def describe_search(case: str, name: str, result: TuneResult) -> list[Arm]:
    summary = result.search
    figures = {"trials": summary.n_end_to_end, "plans_in_grid": summary.grid_size, "seconds": summary.seconds}
    return [
        build_arm([float(value)], case=case, arm=name, metric=metric, unit_of_replication="search")
        for metric, value in figures.items()
    ]


def describe_duel(case: str, pairs: list[tuple[float, float]]) -> list[Arm]:
    """Build arms for both rates, and last for their ratio."""
    columns = {
        ("recommended", "samples_per_s"): [first for first, _ in pairs],
        ("grid's best", "samples_per_s"): [second for _, second in pairs],
        ("recommended", "ratio_to_grid_best"): [first / second for first, second in pairs],
    }
    unit = "group of two fresh processes that take turns"
    return [
        build_arm(values, case=case, arm=arm, metric=metric, unit_of_replication=unit)
        for (arm, metric), values in columns.items()
    ]
