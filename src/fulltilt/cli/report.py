"""``fulltilt report RUN_FOLDER…``: draw the learning curves of trainings, side by side, as one page."""

import argparse
from pathlib import Path

from fulltilt.cli._shared import build_console, print_result
from fulltilt.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="+", metavar="RUN_FOLDER", help="the folder of a training; several to compare")
    parser.add_argument("--out", metavar="F", help="the page to write (default: report.html in the last folder)")


def run(args: argparse.Namespace) -> int:
    path = write_training_report([Path(folder) for folder in args.folders], args.out and Path(args.out))
    print_result(build_console(), str(path))
    return 0


def write_training_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write one HTML page with the learning curves of all ``folders``; return its path. UsageError: a wrong folder."""
    from fulltilt.records.run_folder import find_other_content, write_atomic
    from fulltilt.report.training import read_training
    from fulltilt.report.training_html import build_training_html

    if out is not None and (obstacle := find_other_content(out, b"<!")):
        raise UsageError(f"{out} {obstacle}")
    runs = [read_training(folder) for folder in folders]
    return write_atomic(out or folders[-1] / "report.html", build_training_html(runs))
