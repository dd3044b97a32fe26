"""``python -m benchmarks._document > docs/measured.md``: what the result files say, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks._runner import RESULTS
from benchmarks._schema import Arm, BenchmarkResult, Target, describe_interval
from fulltilt.records import loads

RECORDED = "recorded: "
SAID = {True: "met", False: "missed", None: "undecided"}
HEAD = """# What was measured

Written from the files under `benchmarks/results/` by `python -m benchmarks._document > docs/measured.md`; how to read
them is in [benchmarks.md](benchmarks.md). Intervals are of 95 %; what a whole interval does not say is undecided.
"""


def build_page(results: Path = RESULTS) -> str:
    """Write every result file by name: its targets, and what was recorded beside them; where it has none, its arms."""
    paths = sorted(results.glob("*.json"))
    return "\n".join([HEAD, *(describe(loads(BenchmarkResult, path.read_text("utf-8")), path.name) for path in paths)])


def describe(result: BenchmarkResult, file: str, *, with_arms: bool = False) -> str:
    """Write a section on a result: its targets, and its arms where it has no target or they are asked for."""
    pressure = result.cpu_pressure_pct
    waited = "" if pressure is None else f"; some task waited for a core {pressure:.0f} % of the time"
    cpu = f"{result.machine.cpu_model}, {result.machine.n_cores_usable} cores"
    lines = [
        f"## {result.name}, {result.device}",
        "",
        result.claim,
        "",
        f"[{file}](../benchmarks/results/{file}), {result.date}{_describe_code(result)}; {cpu}{waited}.",
        "",
    ]
    if result.targets:
        lines += [
            "| target | limit | measured | verdict |",
            "|---|---|---|---|",
            *map(_describe_target, result.targets),
            *_describe_recorded(result),
        ]
    if with_arms or not result.targets:
        lines += [""] if result.targets else []
        lines += ["| case | arm | median | n |", "|---|---|---|---|", *map(_describe_arm, result.arms)]
    return "\n".join([*lines, ""])


def _describe_code(result: BenchmarkResult) -> str:
    return "" if result.commit is None else f", code of {result.commit}{' with changes' if result.is_dirty else ''}"


def _describe_recorded(result: BenchmarkResult) -> list[str]:
    """Write a row a strategy and a column a grid of real timings, which no target speaks of."""
    arms = [arm for arm in result.arms if arm.case.startswith(RECORDED) and arm.metric == "regret_pct"]
    if not arms:
        return []
    grids = list(dict.fromkeys(arm.case for arm in arms))
    figures = {}
    for arm in arms:
        p90 = np.quantile(arm.samples, 0.9, method="higher")
        figures[arm.arm, arm.case] = f"{arm.median:.3g} ({p90:.3g})"
    header = [f"recorded grid, speed lost in the median (p90) of {arms[0].n} searches, %"]
    header += [grid.removeprefix(RECORDED) for grid in grids]
    rows = [
        [name, *(figures.get((name, grid), "") for grid in grids)] for name in dict.fromkeys(arm.arm for arm in arms)
    ]
    return ["", _join(header), _join(["---"] * len(header)), *map(_join, rows)]


def _join(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _describe_target(target: Target) -> str:
    interval = "" if target.ci95 is None else f" ({describe_interval(target.ci95)})"
    limit, figure = f"{target.comparison} {target.limit:g}", f"{target.measured:.4g}{interval}"
    return _join([target.name, limit, figure, SAID[target.met]])


def _describe_arm(arm: Arm) -> str:
    """Write the median with its interval; where nothing varies, an interval would claim a spread that was seen."""
    is_same = arm.n > 1 and len(set(arm.samples)) == 1
    spread = f"the same in each {arm.unit_of_replication}" if is_same else describe_interval(arm.ci95)
    return _join([arm.case, arm.arm, f"{arm.median:.4g} ({spread}) {arm.metric}", str(arm.n)])


if __name__ == "__main__":
    print(build_page(), end="")
