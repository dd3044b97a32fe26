"""``fulltilt report RUN_FOLDER…``: the learning curves of one training, or of several side by side, as one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from fulltilt.cli._shared import build_console

REPORT_FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help="the folder of a training; several to compare")
    parser.add_argument("--out", metavar="F", help=f"the page to write (default: {REPORT_FILE} in the last folder)")


def run(args: argparse.Namespace) -> int:
    path = write_training_report([Path(folder) for folder in args.folders], Path(args.out) if args.out else None)
    build_console().print(f"{path}", markup=False)
    return 0


def write_training_report(folders: list[Path], out: Path | None = None) -> Path:
    """Draw the trainings in ``folders`` → the page.

    Raises:
        UsageError: a folder is not that of a training, or it has taken no step yet.
    """
    from fulltilt.records.run_folder import write_atomic
    from fulltilt.report.training import read_training
    from fulltilt.report.training_html import build_training_html

    runs = [read_training(folder) for folder in folders]
    return write_atomic(out or folders[-1] / REPORT_FILE, build_training_html(runs))
