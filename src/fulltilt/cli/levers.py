"""``fulltilt levers``: print the catalogue for people, or as JSON."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.errors import UsageError, format_nearest
from fulltilt.levers import Lever, load_catalogue, load_inference_catalogue
from fulltilt.records import VERSION

if TYPE_CHECKING:
    from rich.table import Table

FIELDS = ("name", "key", "aliases", "default", "unit", "stage", "restart", "trades", "exactness", "summary", "doc")
"""Of a lever, what its JSON holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", metavar="NAME", help="show these levers in full")
    parser.add_argument("--json", metavar="F", help="write the catalogue as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    training = load_catalogue()
    inference = {name: lever for name, lever in load_inference_catalogue().items() if name not in training}
    known = {**training, **inference}
    for name in args.name:
        if name not in known:
            raise UsageError(f"no lever is named {name}: {format_nearest(name, known)}")
    if args.json:
        chosen = {"levers": training, "inference_levers": inference}
        parts = {part: [v for v in c.values() if not args.name or v.name in args.name] for part, c in chosen.items()}
        document = {p: [{field: getattr(v, field) for field in FIELDS} for v in levers] for p, levers in parts.items()}
        write_json(args.json, {"version": VERSION, **document})
    elif args.name or args.verbose:
        for name in args.name or known:
            _print_lever(known[name])
    else:
        _print_catalogue(training, inference)
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


def _print_catalogue(training: Mapping[str, Lever], inference: Mapping[str, Lever]) -> None:
    console = build_console()
    console.print(_build_table(training))
    console.print("\nOf inference, beside precision and threads:\n")
    console.print(_build_table(inference))
    console.print()
    print_result(console, f"{len(training) + len(inference)} levers; `fulltilt levers NAME` shows one in full.")


def _build_table(levers: Mapping[str, Lever]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("lever", "key", "default", "stage", "trades", "what it does"):
        table.add_column(title, overflow="fold")
    for lever in levers.values():
        trades = ", ".join(lever.trades)
        table.add_row(lever.name, lever.key, str(lever.default), lever.stage, trades, lever.summary)
    return table
