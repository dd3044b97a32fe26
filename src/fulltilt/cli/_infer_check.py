"""``fulltilt infer check``: measure whether a model is fast, small and quick enough under a stated load."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._shared import (
    add_workload_arguments,
    build_console,
    note_interruption,
    print_result,
    read_config_and_words,
    show_progress,
    write_json,
)
from fulltilt.records import format_rate
from fulltilt.report.latency import draw_histogram
from fulltilt.report.summary import count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fulltilt.infer.check import CheckResult
    from fulltilt.infer.targets import Load

EXIT_MISSED = 3
STYLES = {"met": "green", "missed": "bold red", "not proven": "yellow"}
SCENARIOS = {
    "server": "Poisson arrivals",
    "single": "one stream, each request when the one before is answered",
    "multi": "one stream of several samples a request, each when the one before is answered",
    "offline": "everything at once",
}


HELP = "measure a model under a stated load and hold it to the targets of its configuration"
DESCRIPTION = (
    "Batch latency and response under Poisson arrivals, throughput and memory against targets: of the "
    "configuration. A task by name is trained once and kept; one of your own is measured as it is built. "
    "Exit code 0: all targets are met; 3: one is missed or not proven; 2: there is nothing to check."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    measured = parser.add_mutually_exclusive_group()
    measured.add_argument("--weights", metavar="RUN_DIR", help="measure the newest checkpoint of this training")
    measured.add_argument("--artefact", metavar="DIR", help="measure this artefact of infer search, request by request")
    parser.add_argument("--out", metavar="DIR", help="where to write (default runs/infer/NAME)")
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")


@note_interruption(lambda: "nothing was measured; a training that had begun goes on with the same command")
def run(args: argparse.Namespace) -> int:
    from fulltilt.infer import check

    config, words = read_config_and_words(args)
    plan = check.plan_check(config, weights=args.weights, artefact=args.artefact)
    out_dir = Path(args.out or Path("runs") / "infer" / plan.name)
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    aside = build_console(to_stderr=True)
    with check.open_check_folder(plan, out_dir) as folder:
        if folder.set_aside:
            aside.print(f"note: {folder.set_aside}")
        weights, is_new = check.prepare_weights(plan, folder, words)
        aside.print(_describe_plan(plan.load))
        with show_progress("measuring") as progress:
            result = check.run_check(plan, out_dir, weights, on_progress=progress)
        previous = check.read_previous(folder, result)
        try:
            write_json(args.json, result)
            _print_result(console, result, previous, is_new=is_new, is_verbose=args.verbose)
        finally:  # a reader of stdout that is gone must not cost the line
            check.append_history(folder, result)
    return 0 if result.met else EXIT_MISSED


def _describe_plan(load: Load) -> str:
    if not load.n_requests:
        return "measuring: batches back to back; no target is about a load"
    if load.requests_per_s is None:
        return f"measuring: batches back to back, then {load.n_requests} requests, {SCENARIOS[load.scenario]}"
    requests = f"{load.n_requests} requests at {format_rate(load.requests_per_s)}/s"
    seconds = format_duration(load.n_requests / load.requests_per_s)
    expected = f"{seconds}, or more where requests wait for each other or leave a target open"
    return f"measuring: batches back to back, then {requests} in {expected}"


def _print_result(
    console: Console, result: CheckResult, previous: Mapping[str, float], *, is_new: bool, is_verbose: bool
) -> None:
    print_result(console, _describe_result(result), style=STYLES["met" if result.met else "missed"])
    console.print(_build_table(result, previous))
    limits = [target.limit * 1000 for target in result.targets if target.name.startswith("response_s")]
    for line in draw_histogram(result.histogram, limit=min(limits, default=None)):
        console.print(line)
    lines = [*_describe_load(result), *_describe_model(result, is_new=is_new), *result.notes]
    lines += _describe_details(result) if is_verbose else []
    for line in [*lines, f"files: {result.out_dir} (history.jsonl, latency.html, measuring.log)"]:
        console.print(f"· {line}")


def _describe_result(result: CheckResult) -> str:
    """Return the result in one sentence, with the figures that missed."""
    n, load = len(result.targets), result.load
    if result.met:
        rate = load.requests_per_s and f" under {format_rate(load.requests_per_s)} requests/s"
        return f"{'The target is' if n == 1 else f'All {n} targets are'} met{rate or ''}."
    grows = result.keeps_up not in (None, "met")
    parts = []
    for verdict in ("missed", "not proven"):
        found = [target for target in result.targets if target.verdict == verdict]
        words = [target.name for target in found]
        if len(found) <= 2:  # else the figures are in the table: this is one sentence
            figures = (
                f"is {format_rate(t.measured)}{' and grows' * (grows and t.name.startswith(('response', 'first')))}"
                for t in found
            )
            words = [f"{t.name} {f} (limit {format_rate(t.limit)})" for t, f in zip(found, figures, strict=True)]
        if found:
            share = f"{len(found)} of {count(n, 'target')}" if not parts else str(len(found))
            parts.append(f"{share} {'is' if len(found) == 1 else 'are'} {verdict}: {', '.join(words)}")
    return "; ".join(parts) + "."


def _build_table(result: CheckResult, previous: Mapping[str, float]) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("target", "limit", "measured", "95 % interval", "verdict", "last time"):
        table.add_column(name, justify="left" if name in ("target", "verdict") else "right")
    for target in result.targets:
        bound = "≥" if target.name in ("samples_per_hour", "tokens_per_s") else "≤"
        low, high = target.ci95
        interval = f"{format_rate(low)} to {'no bound' if high == inf else format_rate(high)}"
        table.add_row(
            target.name,
            f"{bound} {format_rate(target.limit)}",
            format_rate(target.measured),
            "largest seen" if low == high else interval,
            target.verdict,
            format_rate(previous[target.name]) if target.name in previous else "–",
            style=None if target.met else STYLES[target.verdict],
        )
    return table


def _describe_load(result: CheckResult) -> list[str]:
    load = result.load
    capacity_per_s = result.samples_per_hour.measured / 3600 / load.samples_per_request
    each = f"{count(load.samples_per_request, 'sample')} of the {result.inputs}"
    if not load.n_requests:
        return [f"load: none; batches of {each}, back to back"]
    if load.requests_per_s is None:
        return [f"load: {load.n_requests} requests, {SCENARIOS[load.scenario]}, of {each}"]
    lines = [
        f"load: {load.n_requests} requests, Poisson arrivals at {format_rate(load.requests_per_s)}/s, of {each}; "
        "a response counts from the scheduled arrival"
    ]
    if result.keeps_up != "met":
        held = "overloaded" if result.keeps_up == "missed" else "perhaps overloaded"
        lines.append(f"{held}: {format_rate(capacity_per_s)} requests/s are answered, so responses grow with the time")
    return lines


def _describe_model(result: CheckResult, *, is_new: bool) -> list[str]:
    model = f"model: {result.workload} on {result.device}, {result.n_parameters:,} parameters"
    if result.weights is None:
        return [f"{model}, as its function builds it"]
    figures = ", ".join(f"{name} {value:.4g}" for name, value in result.weights["metrics"].items() if "/" not in name)
    kind, origin = "weights", "trained just now" if is_new else "trained earlier"
    if result.weights["kind"] == "artefact":
        kind, origin = "artefact", "as infer search built it"
    return [f"{model}, {origin} ({figures or 'not evaluated'})", f"{kind}: {result.weights['checkpoint']}"]


def _describe_details(result: CheckResult) -> list[str]:
    lines = [
        f"{name}: {', '.join(f'{which} {format_rate(estimate.measured)}' for which, estimate in figures.items())}"
        for name, figures in result.times.items()
    ]
    return [
        *lines,
        f"samples_per_hour: {format_rate(result.samples_per_hour.measured)}",
        f"memory_gib: peak {format_rate(result.memory_gib)}, mean {format_rate(result.memory_mean_gib)}",
        f"levers in force: {', '.join(f'{name} {value}' for name, value in result.levers.items())}",
        f"machine: {result.machine.cpu_model}, {count(result.machine.n_cores_usable, 'usable core')}",
    ]
