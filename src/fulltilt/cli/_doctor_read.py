"""``fulltilt doctor read``: name the places in a training script that may cost time, without running it."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING

from fulltilt.cli._shared import build_console, write_json
from fulltilt.errors import strip_control_codes
from fulltilt.records import VERSION

if TYPE_CHECKING:
    from fulltilt.doctor.read import Reading

N_SHOWN = 5  # findings that fit one screen, three lines each


def add_read(actions: argparse._SubParsersAction) -> None:
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


def _run_read(args: argparse.Namespace) -> int:
    from fulltilt.doctor.read import read_scripts
    from fulltilt.doctor.rules import RULES

    reading = read_scripts(args.paths)
    console = build_console(to_stderr=args.json == "-")
    lines = [_summarise(reading)]
    for found in reading.findings[:N_SHOWN]:
        code = strip_control_codes(found.evidence["code"])
        lines.append(f"{found.file}:{found.line}  {found.rule}\n    {code[:96]}\n    fix: {found.fix}")
    if len(reading.findings) > N_SHOWN:
        lines.append(f"and {len(reading.findings) - N_SHOWN} more; --json F writes all")
    lines += [f"not read: {reason}" for reason in reading.unread[:3]]
    if len(reading.unread) > 3:
        lines.append(f"not read: {len(reading.unread) - 3} files more")
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
