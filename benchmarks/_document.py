"""``python -m benchmarks._document > docs/measured.md``: what the result files say, as a page."""

from __future__ import annotations

from pathlib import Path

from benchmarks._runner import RESULTS, SAID, describe_code
from benchmarks._schema import Arm, BenchmarkResult, Target, describe_interval
from fulltilt.records import loads

HEAD = """# What was measured

Written from the files under `benchmarks/results/` by `python -m benchmarks._document > docs/measured.md`; how to read
them is in [benchmarks.md](benchmarks.md). Intervals are of 95 %; what a whole interval does not say is undecided.
"""


def build_page(results: Path = RESULTS) -> str:
    """Every result file by name: its targets; where it has none, its arms."""
    paths = sorted(results.glob("*.json"))
    return "\n".join([HEAD, *(_describe(loads(BenchmarkResult, path.read_text("utf-8")), path) for path in paths)])


def _describe(result: BenchmarkResult, path: Path) -> str:
    pressure = result.cpu_pressure_pct
    waited = "" if pressure is None else f"; some task waited for a core {pressure:.0f} % of the time"
    cpu = f"{result.machine.cpu_model}, {result.machine.n_cores_usable} cores"
    lines = [
        f"## {result.name}, {result.device}",
        "",
        result.claim,
        "",
        f"[{path.name}](../benchmarks/results/{path.name}), {result.date}{describe_code(result)}; {cpu}{waited}.",
        "",
    ]
    if result.targets:
        lines += [
            "| target | limit | measured | verdict |",
            "|---|---|---|---|",
            *map(_describe_target, result.targets),
        ]
    else:
        lines += ["| case | arm | median | n |", "|---|---|---|---|", *map(_describe_arm, result.arms)]
    return "\n".join([*lines, ""])


def _describe_target(target: Target) -> str:
    interval = "" if target.ci95 is None else f" ({describe_interval(target.ci95)})"
    limit = f"{target.comparison} {target.limit:g}"
    return f"| {_escape(target.name)} | {limit} | {target.measured:.4g}{interval} | {SAID[target.met].lower()} |"


def _describe_arm(arm: Arm) -> str:
    figure = f"{arm.median:.4g} ({describe_interval(arm.ci95)}) {arm.metric}"
    return f"| {_escape(arm.case)} | {_escape(arm.arm)} | {figure} | {arm.n} |"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(build_page(), end="")
