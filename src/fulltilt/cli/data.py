"""``fulltilt data make | make-stl10 | inspect | repack | prepare-text``: data files to measure with, what is slow about
one, the remedy; and text as numbers."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._make_stl10 import add_make_stl10, run_make_stl10
from fulltilt.cli._prepare_text import add_prepare_text, run_prepare_text
from fulltilt.cli._shared import build_console, check_at_least, show_progress, write_json
from fulltilt.errors import UsageError
from fulltilt.records import format_bytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fulltilt.data.tables.hdf5_inspect import DatasetReport, Inspection
    from fulltilt.data.tables.hdf5_repack import Repacked

ACCESSES = {
    "random": "random batches",
    "block_shuffled": "whole blocks, shuffled",
    "sequential": "in order",
    "random_row_by_row": "random, a call a row (h5py)",
}

WARM_PCT = 99.5  # of a file in the page cache: what is missing costs its random rows more than all others
READERS = {
    "mapped": "rows gathered out of the mapped file",
    "pread": "rows read with pread: the file lies on a network file system",
    "h5py": "rows read through h5py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_make(actions)
    add_make_stl10(actions)
    _add_inspect(actions)
    _add_repack(actions)
    add_prepare_text(actions)


def run(args: argparse.Namespace) -> int:
    runs = {
        "make": _run_make,
        "make-stl10": run_make_stl10,
        "inspect": _run_inspect,
        "repack": _run_repack,
        "prepare-text": run_prepare_text,
    }
    return runs[args.action](args)


def _add_make(actions: argparse._SubParsersAction) -> None:
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


def _add_inspect(actions: argparse._SubParsersAction) -> None:
    inspect = actions.add_parser(
        "inspect",
        help="measure how fast the rows of an HDF5 file can be read, and say what to do",
        description="Layout of every dataset of an HDF5 file, and rows/s by way of reading, measured.",
    )
    inspect.add_argument("path", metavar="FILE", help="the HDF5 file")
    inspect.add_argument("--dataset", nargs="+", default=[], metavar="NAME", help="to measure (default: the largest)")
    inspect.add_argument("--batch-size", type=int, default=256, metavar="B", help="rows at a time (default 256)")
    inspect.add_argument("--seconds", type=float, default=1.0, metavar="S", help="for each measurement (default 1)")
    inspect.add_argument("--cold", action="store_true", help="drop the file from the page cache before each")
    inspect.add_argument("--json", metavar="F", help="write the result as JSON; -: to stdout")


def _add_repack(actions: argparse._SubParsersAction) -> None:
    repack = actions.add_parser(
        "repack",
        help="write an HDF5 file again with its rows laid out for training",
        description=(
            "Write the samples of an HDF5 file as one array each (or in chunks of whole rows), keep everything else, "
            "and read every row back before the new file takes its name."
        ),
    )
    repack.add_argument("source", metavar="IN", help="the HDF5 file to read")
    repack.add_argument("target", metavar="OUT", help="the file to write")
    repack.add_argument(
        "--dataset",
        nargs="+",
        default=[],
        metavar="NAME",
        help="lay these out too (default: the datasets with as many rows as the largest)",
    )
    repack.add_argument("--chunk-rows", type=int, metavar="N", help="rows of the largest dataset in a chunk")
    repack.add_argument(
        "--compression", choices=["none", "lzf", "gzip"], default="none", help="of the new file (default none)"
    )
    repack.add_argument("--force", action="store_true", help="replace a file that is there")


def _run_make(args: argparse.Namespace) -> int:
    check_at_least(args, "--n-samples", 1)
    check_at_least(args, "--n-sensors", 1)
    from fulltilt.data import make_sensor_hdf5

    with show_progress(f"writing {args.path}", total=args.n_samples) as progress:
        make_sensor_hdf5(
            args.path,
            n_samples=args.n_samples,
            n_sensors=args.n_sensors,
            seed=args.seed,
            with_info=args.with_info,
            force=args.force,
            progress=progress,
        )
    build_console().print(
        f"{args.path}: {args.n_samples:,} synthetic events of {args.n_sensors:,} sensors, "
        f"{format_bytes(Path(args.path).stat().st_size)}",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _run_inspect(args: argparse.Namespace) -> int:
    if not 0 < args.seconds <= 600:
        raise UsageError(f"--seconds {args.seconds:g} must lie above 0 and at most at 600")
    check_at_least(args, "--batch-size", 1)
    from fulltilt.data import inspect_hdf5

    console = build_console(to_stderr=args.json == "-")
    with build_console(to_stderr=True).status(f"reading {args.path}") as status:
        inspection = inspect_hdf5(
            args.path,
            args.dataset,
            batch_size=args.batch_size,
            seconds=args.seconds,
            cold=args.cold,
            progress=lambda what: status.update(f"measuring {what}"),
        )
    _print_inspection(console, inspection)
    if args.json:
        write_json(args.json, json.dumps(dataclasses.asdict(inspection), indent=1))
    return 0


def _run_repack(args: argparse.Namespace) -> int:
    check_at_least(args, "--chunk-rows", 1)
    from fulltilt.data import repack_hdf5

    with show_progress(f"writing {args.target}, then reading it back") as progress:
        done = repack_hdf5(
            args.source,
            args.target,
            datasets=args.dataset,
            chunk_rows=args.chunk_rows,
            compression=args.compression,
            force=args.force,
            progress=progress,
        )
    build_console().print(
        f"{args.target}: {_describe_rows(done)}, {format_bytes(done.target_bytes)} "
        f"({args.source}: {format_bytes(done.source_bytes)}); every row was read back and is equal "
        f"(BLAKE2b {done.checksum}), {done.seconds:.1f} s",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _describe_rows(done: Repacked) -> str:
    """``800 rows of input, label; 200 rows of test``"""
    by_rows: dict[int, list[str]] = {}
    for name, n_rows in zip(done.datasets, done.n_rows, strict=True):
        by_rows.setdefault(n_rows, []).append(name)
    return "; ".join(f"{n_rows:,} rows of {', '.join(names)}" for n_rows, names in by_rows.items())


def _print_inspection(console: Console, inspection: Inspection) -> None:
    console.print(f"{inspection.path}: {format_bytes(inspection.file_bytes)}", markup=False)
    console.print(_build_layout_table(inspection))
    for report in inspection.datasets:
        if report.rates:
            console.print(_build_rates_table(report))
            console.print(describe_cache(report, inspection.is_cold), markup=False, soft_wrap=True)
        if report.caveat:
            console.print(f"{report.name}: {report.caveat}", markup=False, soft_wrap=True)
        if report.advice:
            console.print(f"{report.name}: {report.advice}", markup=False, soft_wrap=True)
    for command in dict.fromkeys(report.command for report in inspection.datasets if report.command):
        console.print(f"  {command}", markup=False, soft_wrap=True)


def _build_layout_table(inspection: Inspection) -> Table:
    from rich.table import Table

    table = Table(
        "dataset", "shape", "type", "chunks", "filters", "bytes a row", "rows a chunk", "chunks a row", "stored"
    )
    for report in inspection.datasets:
        table.add_row(
            report.name,
            str(report.shape),
            report.dtype,
            "one array" if report.chunks is None else str(report.chunks),
            " + ".join(report.filters) or "none",
            f"{report.row_bytes:,}",
            "" if report.chunk_rows is None else f"{report.chunk_rows:,}",
            f"{report.n_chunks_a_row:,}",
            format_bytes(report.stored_bytes),
        )
    return table


def _build_rates_table(report: DatasetReport) -> Table:
    from rich.table import Table

    table = Table(report.name, "rows/s", "MiB/s", "rows read", "at a time", title_justify="left")
    for rate in report.rates:
        table.add_row(
            ACCESSES[rate.access],
            str(rate),
            f"{rate.rows_per_s * report.row_bytes / 2**20:,.0f}",
            f"{rate.n_rows:,}",
            f"{rate.rows_a_read:,}",
        )
    return table


def describe_cache(report: DatasetReport, is_cold: bool) -> str:
    """How rows were read, and from where."""
    how = READERS[report.reader or "h5py"]
    if is_cold:
        return f"{how}; cold: the system was asked to drop the file from its page cache before each measurement"
    if report.cached_before_pct is None:
        return f"{how}; whether the file lay in the page cache before cannot be told on this file system"
    share = f"{how}; {report.cached_before_pct:.0f} % of the file lay in the page cache before"
    if report.cached_before_pct >= WARM_PCT:
        return f"{share}: these are warm figures, --cold measures from the disk"
    return (
        f"{share}, the rest came from the disk as it was read: the figures are partly cold, the first most, and do not "
        "compare with each other; --cold measures from the disk, and a file that was read whole is warm"
    )
