"""``fulltilt data make``: data files of any size, to measure with."""

from __future__ import annotations

import argparse
from pathlib import Path

from fulltilt.cli._shared import build_console
from fulltilt.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    make = actions.add_parser(
        "make",
        help="write an HDF5 file in the layout of guide 001",
        description="Write an HDF5 file of synthetic events: input (N, 2, S), label (N, 6), xpmt/ypmt/zpmt (S,).",
    )
    make.add_argument("path", metavar="FILE", help="the file to write, for instance data/events.h5")
    make.add_argument("--n-samples", type=int, default=4096, metavar="N", help="events (default 4096)")
    make.add_argument("--n-sensors", type=int, default=5160, metavar="S", help="sensors (default 5160, the guide's)")
    make.add_argument("--seed", type=int, default=0)
    make.add_argument("--with-info", action="store_true", help="also write info (N, 9)")
    make.add_argument("--force", action="store_true", help="replace a file that is there")


def run(args: argparse.Namespace) -> int:
    if args.n_samples < 1 or args.n_sensors < 1:
        raise UsageError(f"--n-samples {args.n_samples} and --n-sensors {args.n_sensors} must both be 1 or more")
    from rich.progress import Progress

    from fulltilt.data import make_sensor_hdf5

    console = build_console(to_stderr=True)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"writing {args.path}", total=args.n_samples)
        make_sensor_hdf5(
            args.path,
            n_samples=args.n_samples,
            n_sensors=args.n_sensors,
            seed=args.seed,
            with_info=args.with_info,
            force=args.force,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    size_mib = Path(args.path).stat().st_size / 2**20
    build_console().print(f"{args.path}: {args.n_samples} synthetic events, {size_mib:,.1f} MiB", markup=False)
    return 0
