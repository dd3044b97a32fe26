"""``fulltilt tune``: the search, the table, the picks, the report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import (
    add_config_argument,
    add_data_path_argument,
    add_device_argument,
    build_console,
    read_config,
    write_json,
)

if TYPE_CHECKING:
    from rich.console import Console

REPORT_FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser, metavar="CONFIG|module:object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    add_data_path_argument(parser)
    add_device_argument(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="B", help="batch sizes to try")
    parser.add_argument("--num-workers", type=int, nargs="+", metavar="W", help="data worker counts to try")
    parser.add_argument("--steps", type=int, metavar="N", help="timed optimizer steps per trial, at least")
    parser.add_argument("--memory-limit", metavar="12GiB", help="what a trial may use; more is out of memory")
    parser.add_argument("--exhaustive", action="store_true", help="run the whole grid")
    parser.add_argument("--quick", action="store_true", help="one round within 90 seconds")
    parser.add_argument("--budget", metavar="6m", help="wall time of the whole search")
    parser.add_argument("--free-batch", action="store_true", help="let the effective batch change")
    parser.add_argument(
        "--lr-rule", choices=["sqrt", "linear", "none"], default="sqrt", help="how lr follows the batch"
    )
    parser.add_argument("--apply", metavar="FILE", help="write the recommended settings into this YAML file")
    parser.add_argument(
        "--out", metavar="DIR", help="run folder (default runs/tune/NAME); the same search resumes there"
    )
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    from fulltilt.cli._live import SearchView
    from fulltilt.config import load_config
    from fulltilt.report import build_tune_html
    from fulltilt.tuner import tune

    if args.apply:
        load_config(args.apply)  # a file that cannot be written into is said before the search, not after it
    console = build_console(to_stderr=args.json == "-")
    with SearchView(console).show() as view:
        result = tune(
            config,
            batch_sizes=args.batch_sizes,
            num_workers=args.num_workers,
            steps=args.steps,
            memory_limit=args.memory_limit,
            exhaustive=args.exhaustive,
            quick=args.quick,
            budget=args.budget,
            free_batch=args.free_batch,
            lr_rule=args.lr_rule,
            out=args.out,
            on_event=view,
        )
    document = result.to_document()
    print_result(console, document)
    files = [Path(result.folder or ".") / "tune.json"]
    from fulltilt.records.run_folder import write_atomic

    files.append(write_atomic(Path(result.folder or ".") / REPORT_FILE, build_tune_html(document)))
    if args.apply:
        print_applied(console, result, args.apply)
    if args.json:
        write_json(args.json, result.to_json_text())
    console.print("files: " + ", ".join(map(str, files)), markup=False)
    return 0


def print_result(console: Console, document: Mapping[str, Any]) -> None:
    """The table, the picks and the notes, for people."""
    from fulltilt.report import (
        PICK_TITLES,
        build_trials_table,
        describe_epoch,
        describe_gain,
        describe_learning_rate,
        describe_pick,
        describe_search,
    )

    marked: dict[str, str] = {}
    for name in ("recommended", "throughput", "efficiency"):
        pick = document["picks"].get(name)
        if pick:
            marked[pick["id"]] = f"{marked[pick['id']]}, {name}" if pick["id"] in marked else name
    console.print()
    console.print(build_trials_table(document["trials"], marked=marked, width=console.width))
    shown: dict[str, str] = {}
    for name, title in PICK_TITLES.items():
        pick = document["picks"].get(name)
        if not pick:
            continue
        console.print(f"\n[bold]{title}[/]")
        same = shown.get(pick["id"])
        shown.setdefault(pick["id"], title)
        for line in [f"the same plan; rule: {pick['rule']}"] if same else describe_pick(pick):
            console.print(f"  {line}", markup=False)
    console.print()
    notes = [describe_gain(document), describe_epoch(document), describe_learning_rate(document)]
    notes += [hint["text"] for hint in document.get("hints", ())] + list(document.get("notes", ()))
    for line in [*notes, describe_search(document)]:
        if line:
            console.print(f"· {line}", markup=False)


def print_applied(console: Console, result: Any, path: str) -> None:
    from fulltilt.tuner.apply import apply_result

    diff = apply_result(result, path)
    if not diff:
        console.print(f"{path} holds the recommended settings already", markup=False)
        return
    console.print(f"\nwritten into {path}:", markup=False)
    for line in diff.splitlines():
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        console.print(f"  {line}", style=style, markup=False)
