"""``fulltilt schema``: write the JSON Schema of the configuration, for editors and for checks."""

from __future__ import annotations

import argparse
import json

from fulltilt.cli._shared import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="F", default="-", help="write it to a file (default: stdout)")


def run(args: argparse.Namespace) -> int:
    from fulltilt.config import schema

    write_json(args.json, json.dumps(schema(), indent=1, ensure_ascii=False))
    return 0
