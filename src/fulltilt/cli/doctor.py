"""``fulltilt doctor read | watch``: say why a training script is slow, from its text or from its run."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.errors import FulltiltError, UsageError, strip_control_codes
from fulltilt.records import VERSION, dumps
from fulltilt.records.run_folder import find_folder_obstacle, write_atomic

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.doctor.read import Reading

EXIT_FOUND = 3
N_SHOWN, N_UNREAD_SHOWN = 5, 3  # findings that fit one screen, three lines each; and files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_read(actions)
    _add_watch(actions)


def _add_read(actions: argparse._SubParsersAction) -> None:
    read = actions.add_parser(
        "read",
        help="find places that may cost time by reading the script; nothing is run",
        description=(
            "Read Python files and name the lines that wait for the device, write a file or run slow Python at every "
            "training step or for every sample. Nothing is imported or run, so nothing is confirmed."
        ),
    )
    read.add_argument("paths", nargs="+", metavar="PATH", help="a Python file, or a folder of them")
    read.add_argument("--json", metavar="F", help="write the findings as JSON; -: to stdout")
    read.set_defaults(run=_run_read)


def _add_watch(actions: argparse._SubParsersAction) -> None:
    watch = actions.add_parser(
        "watch",
        help="run a training command as it is, and say where its steps spend their time",
        description=(
            "Run a training command as it is, and say where its steps spend their time. Ends with the command's own "
            "exit code. A file that every step rewrites or appends to is held back for blocks of four steps, to "
            "measure what it costs; it ends up the same, but another process may find it eight steps behind meanwhile."
        ),
    )
    watch.add_argument("words", nargs="+", metavar="-- CMD", help="the command, such as -- python train.py --epochs 1")
    watch.add_argument("--gate", action="store_true", help="end with 3 where the command ends well and acts are found")
    watch.add_argument("--no-prove", action="store_true", help="only watch: hold no file back")
    watch.add_argument("--out", metavar="DIR", help="where to write report.json (default runs/doctor/SCRIPT)")
    watch.add_argument("--json", metavar="F", help="write the report there too (- for stdout)")
    watch.set_defaults(run=_run_watch)


def _run_read(args: argparse.Namespace) -> int:
    from fulltilt.doctor.read import read_scripts
    from fulltilt.doctor.rules import RULES

    reading = read_scripts(args.paths)
    console = build_console(to_stderr=args.json == "-")
    print_result(console, _summarise(reading), soft_wrap=True)
    lines: list[str] = []
    n_shown = len(reading.findings) if args.verbose else N_SHOWN
    for found in reading.findings[:n_shown]:
        code = strip_control_codes(found.evidence["code"])
        lines.append(f"{found.file}:{found.line}  {found.rule}\n    {code[:96]}\n    fix: {found.fix}")
    if len(reading.findings) > n_shown:
        lines.append(f"and {len(reading.findings) - n_shown} more; --verbose prints all")
    n_shown = len(reading.unread) if args.verbose else N_UNREAD_SHOWN
    lines += [f"not read: {reason}" for reason in reading.unread[:n_shown]]
    if len(reading.unread) > n_shown:
        lines.append(f"not read: {len(reading.unread) - n_shown} files more")
    for line in lines:
        console.print(line, soft_wrap=True)
    document = {
        "version": VERSION,
        "steps": {"n": 0, "wall_ms_median": None},
        "breakdown_pct": {},
        "findings": reading.findings,
        "joint_gain_pct": None,
        "a_a": {"effect_pct": None, "ci95_pct": None},
        "checked": [rule.NAME for rule in RULES],
        "overhead_us_per_step": None,
        "unread": reading.unread,
    }
    write_json(args.json, document)
    return 0


def _summarise(reading: Reading) -> str:
    """Return what was found, in one sentence."""
    where = reading.files[0] if len(reading.files) == 1 else f"{len(reading.files)} files"
    scripts = {hot.source.path for hot in reading.hot_loops} or set(reading.files)
    script = scripts.pop() if len(scripts) == 1 else "train.py"
    measure = f"`fulltilt doctor watch -- python {shlex.quote(script)}`"
    n = len(reading.findings)
    if n:
        places, them = ("1 place", "it") if n == 1 else (f"{n} places", "them")
        return f"{places} in {where} may cost time at every step; nothing was run: {measure} measures {them}"
    if not reading.hot_loops:
        said = f"{where}: no training loop was found (a loop around .backward()), perhaps a framework has it"
        return f"{said}; {measure} sees steps as they run"
    loops = ", ".join(f"{hot.source.path}:{hot.loop.lineno}" for hot in reading.hot_loops[:3])
    said = f"{where}: nothing that every step does outside of an `if` to remark on, in the loop at {loops}"
    return f"{said}; nothing was run: {measure} measures it"


def _run_watch(args: argparse.Namespace) -> int:
    from fulltilt.attach.launch import run_watched

    is_json = args.json == "-"
    script = next((word for word in args.words if word.endswith(".py")), args.words[0])
    args.out = Path(args.out or Path("runs") / "doctor" / Path(script).stem)
    if obstacle := find_folder_obstacle(args.out):  # said before the command runs, not after
        raise UsageError(obstacle)
    with tempfile.TemporaryDirectory(prefix="fulltilt-doctor-") as folder:
        code = run_watched(args.words, folder=Path(folder), proves=not args.no_prove, stdout_to_stderr=is_json)
        try:
            has_acts = _report(args, Path(folder), code)
        except BrokenPipeError:  # who read the report has seen enough
            raise
        except (FulltiltError, OSError) as error:  # the command's own code is worth more than the report
            print(f"fulltilt doctor: no report was written: {error}", file=sys.stderr)
            return code
    return EXIT_FOUND if args.gate and code == 0 and has_acts else code


def _report(args: argparse.Namespace, folder: Path, code: int) -> bool:
    """Write and print the report, and return whether it holds something to act on."""
    from fulltilt.doctor.observation import read_observation
    from fulltilt.doctor.watch import build_document

    document = build_document(read_observation(folder))
    document["command"], document["rc"] = args.words, code
    if code:
        document["notes"].append(f"the command ended with exit code {code}")
    text = dumps(document, indent=1)
    path = write_atomic(args.out / "report.json", text + "\n")
    write_json(args.json, text)
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    _print_report(console, document, path, is_verbose=args.verbose)
    return any(finding["verdict"] == "act" for finding in document["findings"])


def _print_report(console: Console, document: dict[str, Any], path: Path, *, is_verbose: bool) -> None:
    from fulltilt.report.diagnosis import describe_result, describe_steps, list_bars, list_findings

    console.print()
    print_result(console, describe_result(document), style="bold")
    lines = [f"note: {note}" for note in document["notes"]]
    if document["breakdown_pct"]:
        lines = [
            describe_steps(document),
            *list_bars(document),
            *list_findings(document["findings"], is_whole=is_verbose),
            *lines,
        ]
    for line in lines:
        console.print(line)
    console.print(f"report: {path}", soft_wrap=True)
