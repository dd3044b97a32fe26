"""``fulltilt levers``: the catalogue, as people or as JSON."""

from __future__ import annotations

import argparse

from fulltilt.cli._shared import build_console, write_json
from fulltilt.errors import UsageError, format_nearest
from fulltilt.levers import Lever, load_catalogue


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", metavar="NAME", help="show these levers in full")
    parser.add_argument("--json", metavar="F", help="write the catalogue as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    catalogue = load_catalogue()
    unknown = [name for name in args.name if name not in catalogue]
    if unknown:
        raise UsageError(f"no lever is named {unknown[0]}: {format_nearest(unknown[0], catalogue)}")
    levers = [catalogue[name] for name in args.name] or list(catalogue.values())
    if args.json:
        from fulltilt.records import VERSION, dumps

        write_json(args.json, dumps({"version": VERSION, "levers": [describe_lever(x) for x in levers]}, indent=1))
        return 0
    if args.name:
        for lever in levers:
            print_lever(lever)
        return 0
    print_catalogue(levers)
    return 0


def describe_lever(lever: Lever) -> dict[str, object]:
    """A lever as plain data: what the JSON and the documents show."""
    return {
        "name": lever.name,
        "key": lever.key,
        "aliases": list(lever.aliases),
        "default": lever.default,
        "unit": lever.unit,
        "stage": lever.stage,
        "restart": lever.restart,
        "trades": list(lever.trades),
        "exactness": lever.exactness,
        "summary": lever.summary,
        "doc": lever.doc,
    }


def print_lever(lever: Lever) -> None:
    console = build_console()
    unit = f" {lever.unit}" if lever.unit else ""
    console.print(f"[bold]{lever.name}[/]  {lever.key}  (default {lever.default}{unit})")
    if lever.aliases:
        console.print(f"  also spelled: {', '.join(lever.aliases)}")
    console.print(f"  applied at: {lever.stage}; trades: {', '.join(lever.trades)}; results: {lever.exactness}")
    console.print(f"  {lever.summary}\n  {lever.doc}\n", markup=False)


def print_catalogue(levers: list[Lever]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("lever", "key", "default", "stage", "trades", "what it does"):
        table.add_column(title, overflow="fold")
    for lever in levers:
        table.add_row(
            lever.name, lever.key, str(lever.default), lever.stage, ", ".join(lever.trades), lever.summary, style=""
        )
    console = build_console()
    console.print(table)
    console.print("\n`fulltilt levers NAME` shows one in full.", markup=False)
