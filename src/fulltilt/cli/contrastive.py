"""``fulltilt contrastive``: run pre-training, linear probe and clustering of a contrastive task in turn."""

from __future__ import annotations

import argparse
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
from fulltilt.errors import UsageError
from fulltilt.records.run_folder import list_numbered

if TYPE_CHECKING:
    from fulltilt.config import Config
    from fulltilt.engine.loop.endings import TrainResult


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
    parser.add_argument("--resume", action="store_true", help="go on where each phase was left; ended ones stay")
    parser.add_argument("--out", metavar="DIR", help=f"where to write ({describe_default_out('contrastive')})")
    parser.add_argument("--json", metavar="F", help="write the results as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    config = read_config_to_train(args)
    for flag, smallest in (("--probe-epochs", 1), ("--cluster-epochs", 1), ("--clusters", 2)):
        check_at_least(args, flag, smallest)
    if not 0 < args.clear_share <= 1:
        raise UsageError(f"--clear-share {args.clear_share:g} must be above 0 and at most 1")
    folders: list[Path] = []
    with note_interruption(lambda: describe_saved(folders)):
        return _run_phases(args, config, folders)


def _choose_folder(args: argparse.Namespace, config: Config) -> tuple[Path, str | None]:
    """Choose the first folder whose pre-training is this one, or has not begun."""
    from fulltilt.engine.loop.opening import find_run_folders

    usual = Path("runs") / "contrastive" / config.run_name
    found = {each: find_run_folders(each / PHASES[0], config) for each in list_numbered(usual)}
    folder = next(each for each in found if not found[each].change)
    if args.resume and found[folder].own is None:
        folder = usual  # what cannot be resumed is refused, with what changed
    change = found[usual].change
    return folder, f"{usual} holds another run ({change}): this one is in {folder}" if folder != usual else None


def _run_phases(args: argparse.Namespace, config: Config, folders: list[Path]) -> int:
    """Run the phases in their order; ``folders`` gets those that checkpoints are written into."""
    from fulltilt.engine.contrastive.phases import run_phase
    from fulltilt.listeners import EventLog, ProgressBar, build_loggers
    from fulltilt.records import VERSION

    out_dir, said_of_folder = (Path(args.out), None) if args.out else _choose_folder(args, config)
    folders += [out_dir / phase for phase in PHASES]
    options = PhaseOptions(
        probe_epochs=args.probe_epochs,
        cluster_epochs=args.cluster_epochs,
        n_clusters=args.clusters,
        clear_share=args.clear_share,
    )
    console = build_console(to_stderr=args.json == "-")
    if said_of_folder:
        console.print(said_of_folder, soft_wrap=True)
    results: dict[str, TrainResult] = {}
    said: list[str] = []
    for phase in (phase for phase in PHASES if phase in args.phases):
        folder = out_dir / phase
        with show_progress("encoding images") as progress:
            results[phase] = run_phase(
                phase,
                config,
                out_dir=out_dir,
                listeners=[EventLog(folder), *build_loggers(config.run.loggers, folder), ProgressBar(console)],
                resume=args.resume,
                options=options,
                progress=lambda part, done, total, tell=progress: tell(done, total, part),
            )
        figures = ", ".join(f"{name} {value:.4g}" for name, value in results[phase].metrics.items())
        said.append(f"{phase}: {figures or 'no evaluation'}")
        console.print(f"{said[-1]}; files: {folder}")
    if args.quiet:
        print_result(console, "; ".join(said))
    write_json(args.json, {"version": VERSION, "phases": results})
    return 0
