"""``fulltilt contrastive``: run pre-training, linear probe and clustering of a contrastive task in turn."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._shared import (
    add_workload_arguments,
    build_console,
    check_at_least,
    describe_default_out,
    describe_saved,
    note_interruption,
    print_result,
    read_config_to_train,
    show_progress,
    write_json,
)
from fulltilt.engine.contrastive.options import PHASES, PhaseOptions
from fulltilt.errors import UsageError, name_file
from fulltilt.records.run_folder import list_numbered

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.config import Config
    from fulltilt.engine.contrastive.phases import Place
    from fulltilt.engine.loop.endings import TrainResult
    from fulltilt.records import Listener
    from fulltilt.tasks import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = PhaseOptions()
    add_workload_arguments(parser)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="default: all, in this order")
    parser.add_argument("--epochs", type=int, metavar="N", help="of pre-training (run.epochs)")
    for flag, value, what in (
        ("--probe-epochs", default.probe_epochs, "of the linear probe"),
        ("--cluster-epochs", default.cluster_epochs, "of the head"),
    ):
        parser.add_argument(flag, type=int, default=value, metavar="N", help=f"{what} (default {value})")
    parser.add_argument("--clusters", type=int, metavar="K", help="default: as many as the data has classes")
    parser.add_argument(
        "--clear-share",
        type=float,
        default=default.clear_share,
        metavar="S",
        help=f"of each cluster, what the head trains on ({default.clear_share})",
    )
    said = "go on where each phase was left, with other --epochs too; the same command does so by itself"
    parser.add_argument("--resume", action="store_true", help=said)
    parser.add_argument("--out", metavar="DIR", help=f"where to write ({describe_default_out('contrastive')})")
    parser.add_argument("--json", metavar="F", help="write the results as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    here = Path.cwd()  # code of the model or the data may change it
    config = read_config_to_train(args)
    for flag, smallest in (("--probe-epochs", 1), ("--cluster-epochs", 1), ("--clusters", 2)):
        check_at_least(args, flag, smallest)
    if not 0 < args.clear_share <= 1:
        raise UsageError(f"--clear-share {args.clear_share:g} must be above 0 and at most 1")
    folders: list[Path] = []
    with note_interruption(lambda: describe_saved(folders)):
        return _run_phases(args, config, folders, here)


def _read_end(folder: Path) -> tuple[int | None, str]:
    """Read how many epochs a run was to take, and how it ended; None: there is no run."""
    from fulltilt.engine.checkpoints.files import find_checkpoint
    from fulltilt.report.training import read_end

    return read_end(folder) if find_checkpoint(folder) else (None, "")


def _choose_folder(
    usual: Path, config: Config, console: Console, workload: Workload | None, *,
    inner: str = "", any_length: bool, must_be_there: bool,
) -> Path:  # fmt: skip
    """Choose the first folder that holds this very run or no run, and say which."""
    from fulltilt.engine.loop.opening import find_run_folders

    why, folder, is_there = "", usual, False
    for folder in list_numbered(usual):
        found, (n_epochs, _) = find_run_folders(folder / inner, config, workload), _read_end(folder / inner)
        is_there = found.own is not None
        if not found.change and (any_length or n_epochs in (None, config.run.epochs)):
            break
        why = why or found.change or f"changed: run.epochs {n_epochs} → {config.run.epochs}"
    if folder == usual or (must_be_there and not is_there):
        return usual  # where it is refused, with what changed
    said = f"{name_file(usual)} holds another run ({why}): this one is in {name_file(folder)}"
    console.print(said, soft_wrap=True)
    return folder


def _build_place(
    args: argparse.Namespace, config: Config, folders: list[Path], complete: set[str], console: Console
) -> Place:
    """Build what places the phases: the same goes on, and one that is ``complete`` is told nobody."""
    from fulltilt.listeners import EventLog, ProgressBar, build_loggers

    def place(usual: Path, settings: Config, head: Workload | None) -> tuple[Path, Sequence[Listener], bool]:
        folder = usual
        if head is not None and not args.out:  # by the pre-training the folder of them all was chosen
            folder = _choose_folder(usual, settings, console, head, any_length=args.resume, must_be_there=args.resume)
        folders.append(folder)
        n_epochs, end = _read_end(folder)
        if n_epochs == settings.run.epochs and end == "finished":
            complete.add(str(folder))
            return folder, [], True
        goes_on = n_epochs == settings.run.epochs and end in ("", "interrupted")
        listeners = [EventLog(folder), *build_loggers(config.run.loggers, folder), ProgressBar(console)]
        return folder, listeners, args.resume or goes_on

    return place


def _run_phases(args: argparse.Namespace, config: Config, folders: list[Path], here: Path) -> int:
    """Run the phases in their order; ``folders`` gets those that checkpoints are written into."""
    from fulltilt.engine.contrastive.phases import run_phase
    from fulltilt.records import VERSION

    console = build_console(to_stderr=args.json == "-")
    out_dir = here / (args.out or Path("runs") / "contrastive" / config.run_name)
    if not args.out:
        trains = PHASES[0] in args.phases
        how = {"any_length": args.resume or not trains, "must_be_there": args.resume and trains}
        out_dir = _choose_folder(out_dir, config, console, None, inner=PHASES[0], **how)
    folders += [out_dir / phase for phase in PHASES]
    lengths = {"probe_epochs": args.probe_epochs, "cluster_epochs": args.cluster_epochs}
    options = PhaseOptions(**lengths, n_clusters=args.clusters, clear_share=args.clear_share)
    results: dict[str, TrainResult] = {}
    complete: set[str] = set()
    place = _build_place(args, config, folders, complete, console)
    said: dict[str, str] = {}
    for phase in (phase for phase in PHASES if phase in args.phases):
        with show_progress("encoding images") as progress:
            results[phase] = run_phase(
                phase, config, out_dir=out_dir, place=place, options=options,
                progress=lambda part, done, total, tell=progress: tell(done, total, part),
            )  # fmt: skip
        figures = ", ".join(f"{name} {value:.4g}" for name, value in results[phase].metrics.items())
        said[phase], folder = f"{phase}: {figures or 'no evaluation'}", results[phase].out_dir
        if folder not in complete:
            console.print(f"{said[phase]}; files: {name_file(folder)}")
    old = [said.pop(phase) for phase in results if results[phase].out_dir in complete]
    if old:
        print_result(console, f"Complete already: {'; '.join(old)}; files: {name_file(out_dir)}", soft_wrap=True)
    if args.quiet and said:
        print_result(console, "; ".join(said.values()))
    write_json(args.json, {"version": VERSION, "phases": results})
    return 0
