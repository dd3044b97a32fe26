"""``fulltilt check``: make the dry run and go through the checklist before an experiment."""

import argparse
from pathlib import Path

from fulltilt.cli._shared import (
    add_memory_limit_argument,
    add_workload_arguments,
    build_console,
    read_config_to_train,
    read_memory_limit_bytes,
    write_json,
)

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    add_memory_limit_argument(parser)
    parser.add_argument("--out", metavar="DIR", default="runs", help="where the run would write (default runs)")
    parser.add_argument("--json", metavar="F", help="write the list as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    config, memory_limit_bytes = read_config_to_train(args), read_memory_limit_bytes(args)
    from fulltilt.engine.build.builder import check_device
    from fulltilt.engine.check.checklist import run_checks
    from fulltilt.engine.ranks.world import plan_devices
    from fulltilt.records import VERSION

    devices = [str(check_device(name)) for name in plan_devices(config)]
    items = run_checks(
        config,
        device=devices[0],
        out_dir=Path(args.out),
        rank_devices=devices if len(devices) > 1 else (),
        memory_limit_bytes=memory_limit_bytes,
    )
    n_problems = sum(item.verdict == "problem" for item in items)
    document = {"version": VERSION, "config": config.source, "device": devices[0], "items": items}
    write_json(args.json, {**document, "n_problems": n_problems})
    console = build_console(to_stderr=args.json == "-")
    for item in items:
        console.print(f"{item.verdict:<8}", style=STYLES[item.verdict], end="")
        console.print(f"{item.name}: {item.text}")
    return 3 if n_problems else 0
