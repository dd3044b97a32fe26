"""``fulltilt data``: write data files, and measure how fast an HDF5 file can be read (``inspect``)."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from fulltilt.cli._data_files import add_make, add_make_stl10, add_prepare_text, add_repack
from fulltilt.cli._shared import build_console, check_at_least, print_result, write_json
from fulltilt.errors import UsageError
from fulltilt.records import format_bytes
from fulltilt.report.summary import count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from fulltilt.data.tables.hdf5_inspect import DatasetReport, Inspection

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
    add_make(actions)
    add_make_stl10(actions)
    _add_inspect(actions)
    add_repack(actions)
    add_prepare_text(actions)


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
    inspect.set_defaults(run=_run_inspect)


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
    write_json(args.json, json.dumps(dataclasses.asdict(inspection), indent=1))
    return 0


def _print_inspection(console: Console, inspection: Inspection) -> None:
    print_result(console, describe_inspection(inspection), soft_wrap=True)
    console.print(_build_layout_table(inspection))
    for report in inspection.datasets:
        if report.rates:
            console.print(_build_rates_table(report))
            console.print(describe_cache(report, inspection.is_cold), soft_wrap=True)
        if report.caveat:
            console.print(f"{report.name}: {report.caveat}", soft_wrap=True)
        if report.advice:
            console.print(f"{report.name}: {report.advice}", soft_wrap=True)
    for command in dict.fromkeys(report.command for report in inspection.datasets if report.command):
        console.print(f"  {command}", soft_wrap=True)


def describe_inspection(inspection: Inspection) -> str:
    """Say in one sentence how large the file is and how fast its rows are read."""
    fastest = [
        f"{report.name}: {rate} rows/s of {ACCESSES[rate.access]}"
        for report in inspection.datasets
        for rate in report.rates[:1]
    ]
    n_advised = sum(report.command is not None for report in inspection.datasets)
    advice = f"; fulltilt data repack would lay {count(n_advised, 'dataset')} out better" if n_advised else ""
    size = f"{inspection.path}: {format_bytes(inspection.file_bytes)}"
    return "; ".join([size, *fastest]) + advice


def _build_layout_table(inspection: Inspection) -> Table:
    from rich.table import Table

    titles = ("dataset", "shape", "type", "chunks", "filters", "bytes a row", "rows a chunk", "chunks a row", "stored")
    table = Table(*titles)
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
    """Say how rows were read, and from where."""
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
