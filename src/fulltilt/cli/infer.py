"""``fulltilt infer``: targets checked, the fastest way searched, served, loaded and verified; one file an action."""

from __future__ import annotations

import argparse
import importlib

ACTIONS = ("check", "search", "serve", "load", "verify")
"""Each is a module ``_infer_NAME`` with HELP, DESCRIPTION, add_arguments(parser) and run(args)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        action = _import(name)
        action.add_arguments(actions.add_parser(name, help=action.HELP, description=action.DESCRIPTION))


def run(args: argparse.Namespace) -> int:
    return _import(args.action).run(args)


def _import(name: str):
    return importlib.import_module(f"fulltilt.cli._infer_{name}")
