"""``fulltilt monitor``: watch GPUs, cores, memory and disk, live or a line at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import TYPE_CHECKING

from fulltilt.cli._shared import build_console
from fulltilt.errors import UsageError

if TYPE_CHECKING:
    from fulltilt.hardware.sampler import Sample

SHORTEST_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--interval", type=float, default=2.0, metavar="S", help="seconds between readings (default 2)")
    parser.add_argument("--lines", action="store_true", help="print a line a reading, for a log; off a terminal always")
    parser.add_argument("--once", action="store_true", help="read once and end")
    parser.add_argument("--json", action="store_true", help="print each reading as a line of JSON")


def run(args: argparse.Namespace) -> int:
    """Read until interrupted."""
    from fulltilt.hardware import RealNvml
    from fulltilt.hardware.sampler import Sampler

    if not args.interval >= SHORTEST_S:
        raise UsageError(f"--interval {args.interval:g} must be {SHORTEST_S:g} or more")
    console = build_console(is_screen=True)
    with contextlib.closing(RealNvml()) as nvml, contextlib.suppress(KeyboardInterrupt):
        sampler = Sampler(nvml)
        time.sleep(min(args.interval, 0.5))  # the cores' share is one of a stretch of time
        if args.once or args.lines or args.json or not console.is_terminal:
            while True:
                _print(sampler.read(), as_json=args.json)
                if args.once:
                    return 0
                time.sleep(args.interval)
        from rich.live import Live

        from fulltilt.report.readings import build_table

        with Live(build_table(sampler.read()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                live.update(build_table(sampler.read()), refresh=True)
    return 0


def _print(sample: Sample, *, as_json: bool) -> None:
    from fulltilt.report.readings import build_entry, describe

    print(json.dumps(build_entry(sample)) if as_json else describe(sample), flush=True)
