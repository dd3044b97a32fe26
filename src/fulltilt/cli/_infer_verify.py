"""``fulltilt infer verify``: hold an artefact to what it recorded, on this machine, with these versions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fulltilt.cli._shared import build_console, print_result, show_progress, write_json

EXIT_FAILED = 3

HELP = "answer an artefact's samples again, and compare with what it recorded and with eager PyTorch"
DESCRIPTION = (
    "Digests of all files, the real samples answered again and compared with the recorded outputs, speed against "
    "eager fp32 in turns. An artefact that passes with other versions than it was built with is admitted for them; "
    "until then eager fp32 answers in its place. Exit code 0: all holds; 3: something does not."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", help="the artefact: a folder with manifest.json")
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    from fulltilt.infer.verifying import verify_artefact

    with show_progress("verifying") as progress:
        result = verify_artefact(Path(args.folder), on_progress=progress)
    write_json(args.json, result)
    _print_result(result, to_stderr=args.json == "-")
    return 0 if result["passed"] else EXIT_FAILED


def _print_result(result: dict[str, Any], *, to_stderr: bool) -> None:
    console = build_console(to_stderr=to_stderr, is_screen=True)
    name, passed, last = result["name"], result["passed"], result["checks"][-1]
    sentence = f"{name} holds here." if passed else f"{name} does not hold here: {last['name']}."
    print_result(console, sentence, style="green" if passed else "bold red")
    for check in result["checks"]:
        console.print(f"· {check['name']}: {check['text']}", style=None if check["passed"] else "bold red")
    mismatch = (result["mismatch"] or "").partition(";")[0]
    if result["admitted"]:
        console.print(f"· admitted for what is here ({mismatch})")
    elif passed and mismatch:
        console.print(f"· not admitted, its folder cannot be written: eager fp32 answers in its place ({mismatch})")
    elif mismatch or last["name"] in ("files", "opens"):
        console.print(
            "· where weights and samples are whole, eager fp32 answers in its place; build it anew to have it back"
        )
    elif not passed:
        console.print("· a server opens it all the same; build it anew, or serve its configuration")
