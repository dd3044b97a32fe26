"""``fulltilt levers``: print the catalogue for people, or as JSON."""

import argparse

from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.errors import UsageError, format_nearest
from fulltilt.levers import Lever, load_catalogue
from fulltilt.records import VERSION

FIELDS = ("name", "key", "aliases", "default", "unit", "stage", "restart", "trades", "exactness", "summary", "doc")
"""Of a lever, what its JSON holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", metavar="NAME", help="show these levers in full")
    parser.add_argument("--json", metavar="F", help="write the catalogue as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    catalogue = load_catalogue()
    for name in args.name:
        if name not in catalogue:
            raise UsageError(f"no lever is named {name}: {format_nearest(name, catalogue)}")
    levers = [catalogue[name] for name in args.name] or list(catalogue.values())
    if args.json:
        document = [{field: getattr(lever, field) for field in FIELDS} for lever in levers]
        write_json(args.json, {"version": VERSION, "levers": document})
    elif args.name or args.verbose:
        for lever in levers:
            _print_lever(lever)
    else:
        _print_catalogue(levers)
    return 0


def _print_lever(lever: Lever) -> None:
    console = build_console()
    unit = f" {lever.unit}" if lever.unit else ""
    print_result(console, f"{lever.name}: {lever.summary}", style="bold")
    console.print(f"  {lever.key}  (default {lever.default}{unit})")
    if lever.aliases:
        console.print(f"  also spelled: {', '.join(lever.aliases)}")
    console.print(f"  applied at: {lever.stage}; trades: {', '.join(lever.trades)}; results: {lever.exactness}")
    console.print(f"  {lever.doc}\n")


def _print_catalogue(levers: list[Lever]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("lever", "key", "default", "stage", "trades", "what it does"):
        table.add_column(title, overflow="fold")
    for lever in levers:
        trades = ", ".join(lever.trades)
        table.add_row(lever.name, lever.key, str(lever.default), lever.stage, trades, lever.summary)
    console = build_console()
    console.print(table)
    console.print()
    print_result(console, f"{len(levers)} levers; `fulltilt levers NAME` shows one in full.")
