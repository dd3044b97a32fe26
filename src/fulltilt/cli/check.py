"""``fulltilt check``: make the dry run and go through the checklist before an experiment."""

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._shared import (
    add_memory_limit_argument,
    add_workload_arguments,
    build_console,
    print_result,
    read_config_to_train,
    read_memory_limit_bytes,
    write_json,
)
from fulltilt.errors import FulltiltError

if TYPE_CHECKING:
    from fulltilt.engine.check.checklist import CheckItem

STYLES = {"problem": "bold red", "note": "yellow", "ok": ""}  # in the order in which they are told
CUT = " … (--verbose)"  # ends what would not leave all of it on a screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    add_memory_limit_argument(parser)
    parser.add_argument("--out", metavar="DIR", default="runs", help="where the run would write (default runs)")
    parser.add_argument("--json", metavar="F", help="write the list as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    config, memory_limit_bytes = read_config_to_train(args), read_memory_limit_bytes(args)
    from fulltilt.engine.build.builder import check_device
    from fulltilt.engine.check.checklist import CheckItem, run_checks
    from fulltilt.engine.ranks.world import find_rank, plan_devices
    from fulltilt.listeners import build_loggers
    from fulltilt.records import VERSION

    find_rank()  # for its error
    devices = [str(check_device(name)) for name in plan_devices(config)]
    items: list[CheckItem] = []
    try:
        build_loggers(config.run.loggers, Path(args.out))
    except FulltiltError as error:
        items.append(CheckItem("loggers", "problem", str(error)))
    items += run_checks(
        config,
        device=devices[0],
        out_dir=Path(args.out),
        rank_devices=devices if len(devices) > 1 else (),
        memory_limit_bytes=memory_limit_bytes,
    )
    n_problems = sum(item.verdict == "problem" for item in items)
    document = {"version": VERSION, "config": config.source, "device": devices[0], "items": items}
    write_json(args.json, {**document, "n_problems": n_problems})
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    print_result(console, describe_readiness(items), style="bold")
    wrapper = textwrap.TextWrapper(console.width, subsequent_indent=" " * 8, break_on_hyphens=False, placeholder=CUT)
    wrapper.max_lines = None if args.verbose else _choose_max_lines(items, wrapper)
    for item in sorted(items, key=lambda item: [*STYLES].index(item.verdict)):
        if args.quiet and item.verdict == "problem":
            print_result(console, f"problem {item.name}: {item.text}")
        console.print(wrapper.fill(_describe(item)), style=STYLES[item.verdict])
    return 3 if n_problems else 0


def _describe(item: "CheckItem") -> str:
    return f"{item.verdict:<8}{item.name}: {item.text}"


def _choose_max_lines(items: Sequence["CheckItem"], wrapper: textwrap.TextWrapper) -> int:
    """Choose how many lines each item may have, so that all are on one screen."""
    from fulltilt.report.verdict import N_LINES

    lengths = [len(wrapper.wrap(_describe(item))) for item in items]
    fitting = [n for n in range(1, N_LINES) if sum(min(n, length) for length in lengths) < N_LINES]
    return max(fitting, default=1)


def describe_readiness(items: Sequence["CheckItem"]) -> str:
    """Say in one sentence whether the run can start."""
    problems, notes = ([item.name for item in items if item.verdict == verdict] for verdict in ("problem", "note"))
    if problems:
        fail = "fails" if len(problems) == 1 else "fail"
        return f"Not ready: {len(problems)} of {len(items)} checks {fail}: {', '.join(dict.fromkeys(problems))}."
    if notes:
        return f"Ready: no check fails; there are notes on {', '.join(dict.fromkeys(notes))}."
    return f"Ready: all {len(items)} checks pass."
