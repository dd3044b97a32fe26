"""``fulltilt infer search``: find the fastest way to answer with a model that keeps accuracy and targets."""

from __future__ import annotations

import argparse
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
from fulltilt.errors import ConfigError, UsageError
from fulltilt.records import format_rate
from fulltilt.records.run_folder import find_folder_obstacle
from fulltilt.records.trial import is_busy_pressure
from fulltilt.report.summary import count, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fulltilt.infer.search.result import Candidate, SearchResult

BUDGET = "10m"
FOLDER = "search"
N_ROWS = 14
STYLES = {"chosen": "bold green", "offered": "green", "baseline": None}
ORDER = (
    "chosen",
    "offered",
    "baseline",
    "slower",
    "behind",
    "refused",
    "out_of_memory",
    "timeout",
    "failed",
    "untried",
)

HELP = "find the fastest engine, precision and batching that keeps the accuracy and the targets"
DESCRIPTION = (
    "Builds every candidate that can run here in a process of its own, holds its answers against eager fp32, proves "
    "that it is faster in turns with eager, and loads the best as they would be served. Without a target for the "
    "response the most samples a second win. Interrupted, it goes on with the same command."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--weights", metavar="RUN_DIR", help="of the newest checkpoint of this training")
    parser.add_argument("--budget", metavar="10m", default=BUDGET, help=f"time for the search (default {BUDGET})")
    parser.add_argument(
        "--artefact-out", metavar="DIR", help="where the chosen artefact goes (default OUT/search/chosen)"
    )
    parser.add_argument("--out", metavar="DIR", help="where to write (default runs/infer/NAME, as check does)")
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")


@note_interruption(lambda: "what was measured is kept; the same command goes on from there")
def run(args: argparse.Namespace) -> int:
    from fulltilt.config import parse_duration_s
    from fulltilt.infer import check
    from fulltilt.infer.search.run import CHOSEN, open_search_folder, run_search

    config, words = read_config_and_words(args)
    try:
        budget_s = parse_duration_s(args.budget)
    except ConfigError as error:
        raise UsageError(f"--budget {error}") from None
    if config.targets.first_token_s or config.targets.tokens_per_s:
        raise UsageError(
            "targets.first_token_s and tokens_per_s cannot be searched: a model writes in eager mode, no other engine "
            "has its cache; fulltilt infer check holds it to them, fulltilt infer serve CONFIG writes"
        )
    checked = check.plan_check(config, weights=args.weights, needs_targets=False)
    out_dir = Path(args.out or Path("runs") / "infer" / checked.name)
    console, aside = build_console(to_stderr=args.json == "-", is_screen=True), build_console(to_stderr=True)
    artefact = _check_new(Path(args.artefact_out)) if args.artefact_out else out_dir / FOLDER / CHOSEN
    with check.open_check_folder(checked, out_dir) as folder:
        weights, _ = check.prepare_weights(checked, folder, words)
        with open_search_folder(checked, weights, out_dir / FOLDER) as own:
            for note in filter(None, (folder.set_aside, own.set_aside)):
                aside.print(f"note: {note}")
            with show_progress("searching") as progress:
                result = run_search(
                    checked, weights, own.path, budget_s=budget_s, artefact=artefact, on_progress=progress
                )
    write_json(args.json, result)
    print_search(console, result, is_verbose=args.verbose)
    return 0


def _check_new(path: Path) -> Path:
    """Refuse a folder that holds something else than an artefact: it would be replaced."""
    if path.exists() and not (path / "manifest.json").is_file() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"--artefact-out {path} is there and is no artefact; name another folder")
    if obstacle := find_folder_obstacle(path.parent):  # said before the search, not after
        raise UsageError(f"--artefact-out {path}: {obstacle.replace('--out', '--artefact-out')}")
    return path.resolve() if path.is_symlink() else path


def print_search(console: Console, result: SearchResult, *, is_verbose: bool) -> None:
    print_result(console, describe_search(result), style="green" if result.gain else None)
    console.print(_build_table(result, console.width, is_verbose=is_verbose))
    for line in _describe_rest(result, is_verbose=is_verbose):
        console.print(f"· {line}")


def describe_search(result: SearchResult) -> str:
    """Return the result in one sentence."""
    row = result.find(result.chosen)
    said = [_describe_gain(result, row)]
    if row.live is not None and row.live.measured_s is not None:
        share = f"p{100 * row.live.quantile:g}"
        ms = format_rate(1000 * row.live.measured_s)
        said.append(f"{share} {ms} ms at {format_rate(row.live.requests_per_s)} requests/s")
    accuracy = _describe_accuracy(row)
    sentence = ", ".join([*said, *([accuracy] if accuracy and result.gain else [])])
    n_untried = sum(row.status == "untried" for row in result.candidates)
    left = f"; there was no time for {n_untried} of {len(result.candidates)} candidates" if n_untried else ""
    return f"{sentence}{left}."


def _describe_gain(result: SearchResult, row: Candidate) -> str:
    if result.gain is None:
        gains = [each.gain for each in result.candidates if each.gain]
        rate = f"{format_rate(row.samples_per_s or 0)} samples/s"
        if any(gain.verdict == "faster" for gain in gains):
            return f"{row.name} stays, since nothing that is faster was accepted; it answers {rate}"
        said = f"Nothing is proven faster than {row.name}"
        return f"{said}, which answers {rate}" if gains else said  # without turns its rate is an estimate
    low, high = (1 + pct / 100 for pct in result.gain.ci_pct)
    times = f"{result.gain.speedup:.3g} times as many samples a second as"
    return f"{row.name} answers {times} eager fp32 ({low:.3g} to {high:.3g})"


def _describe_accuracy(row: Candidate) -> str:
    found = row.accuracy
    if found is None:
        return ""
    if found.metric and found.metric_fp32 is not None and found.metric_here is not None:
        scale, unit = (100, " %") if found.metric == "accuracy" else (1, "")
        return f"{found.metric} {scale * found.metric_fp32:.4g} → {scale * found.metric_here:.4g}{unit}"
    if found.changed_labels_pct is not None:
        return f"{found.changed_labels_pct:.3g} % of labels changed"
    return f"error {found.sqnr_db:.0f} dB below"


def _count_shown(result: SearchResult) -> int:
    """Count the rows that say something; who was never measured has none without ``--verbose``."""
    return min(N_ROWS, sum(row.status != "untried" or row.samples_per_s is not None for row in result.candidates))


def _build_table(result: SearchResult, width: int, *, is_verbose: bool) -> Table:
    from rich.table import Table

    rows = sorted(result.candidates, key=lambda row: (ORDER.index(row.status), -(row.samples_per_s or 0)))
    if not is_verbose:
        rows = rows[: _count_shown(result)]
    percentile = [f"p{100 * result.goal.quantile:g} ms"] if result.goal.is_capacity else []
    cells = [_list_cells(row, result) for row in rows]
    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, name in enumerate(("candidate", "samples/s", "× eager", "batch", "GiB", *percentile)):
        widest = max(len(name), *(len(row[i]) for row in cells))
        table.add_column(name, justify="right" if i else "left", no_wrap=True, width=widest)
        width -= widest + 2
    table.add_column("what became of it", no_wrap=True, overflow="ellipsis", max_width=max(width, 20))
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line, style=STYLES.get(row.status, "dim"))
    return table


def _list_cells(row: Candidate, result: SearchResult) -> list[str]:
    response_s = row.live and row.live.measured_s
    return [
        row.name,
        "" if row.samples_per_s is None else format_rate(row.samples_per_s),
        f"{row.gain.speedup:.2f}" if row.gain else "1" if row.status == "baseline" else "",
        "" if row.policy is None else str(row.policy.max_batch),
        "" if row.memory_gib is None else f"{row.memory_gib:.2f}",
        *(["" if response_s is None else format_rate(1000 * response_s)] if result.goal.is_capacity else []),
        _describe_status(row, result),
    ]


def _describe_status(row: Candidate, result: SearchResult) -> str:
    if row.status in ("chosen", "offered", "baseline"):
        words = [f"{row.status}{'*' * (row.name in result.front)}", _describe_accuracy(row)]
        return ", ".join(filter(None, words))
    return f"{row.status.replace('_', ' ')}: {row.reason}"


def _describe_rest(result: SearchResult, *, is_verbose: bool) -> list[str]:
    lengths = result.lengths
    lines = []
    n_hidden = len(result.candidates) - _count_shown(result)
    if n_hidden > 0 and not is_verbose:
        lines.append(f"{count(n_hidden, 'more candidate')} in --verbose and result.json")
    longest = max(lengths)
    if min(lengths) < longest:
        padded = f"{100 * (1 - sum(lengths) / (longest * len(lengths))):.0f} % would be padding"
        lines.append(f"lengths {min(lengths)} to {longest}: padded to the longest {padded}")
    if is_busy_pressure(result.cpu_pressure_pct):
        lines.append(
            f"the machine was busy, {result.cpu_pressure_pct:.0f} % of the time somebody waited for a core: candidates "
            "with several threads suffer most; search again when it is quiet"
        )
    if is_verbose:
        lines += [f"not applicable: {name}: {why}" for name, why in result.not_applicable.items()]
    elif result.not_applicable:
        lines.append(f"{count(len(result.not_applicable), 'combination')} cannot apply here (--verbose says why)")
    lines.append("* no other one is better in throughput, accuracy, memory and response under load at once")
    lines += result.notes
    lines.append(
        f"{count(len(result.candidates), 'candidate')}, {result.n_groups} groups in turns, "
        f"{format_duration(result.seconds)} of {format_duration(result.budget_s)}; files: {result.out_dir}"
    )
    return [*lines, f"next: {result.next}"]
