"""``fulltilt contrastive``: pre-training, linear probe and clustering of a contrastive task, one after the other."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import (
    add_config_argument,
    add_data_path_argument,
    add_device_argument,
    build_console,
    check_at_least,
    note_checkpoints,
    read_config,
    write_json,
)
from fulltilt.engine.contrastive.options import PHASES, PhaseOptions
from fulltilt.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from fulltilt.config import Config
    from fulltilt.engine.loop.endings import TrainResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = PhaseOptions()
    add_config_argument(parser)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="default: all, in this order")
    add_data_path_argument(parser)
    add_device_argument(parser)
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
    parser.add_argument("--out", metavar="DIR", help="where to write (default runs/contrastive/NAME)")
    parser.add_argument("--json", metavar="F", help="write the results as JSON (- for stdout)")
    parser.add_argument("--quiet", action="store_true", help="no progress; warnings only")


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    _check_options(args)
    with note_checkpoints() as folders:
        return _run_phases(args, config, folders)


def _run_phases(args: argparse.Namespace, config: Config, folders: list[Path]) -> int:
    """The phases in their order; ``folders`` gets those that checkpoints are written into."""
    from fulltilt.engine.build.assemble import name_run

    out_dir = Path(args.out or Path("runs") / "contrastive" / name_run(config))
    folders += [out_dir / phase for phase in PHASES]
    options = PhaseOptions(
        probe_epochs=args.probe_epochs,
        cluster_epochs=args.cluster_epochs,
        n_clusters=args.clusters,
        clear_share=args.clear_share,
    )
    console = build_console(to_stderr=args.json == "-")
    results: dict[str, TrainResult] = {}
    for phase in (phase for phase in PHASES if phase in args.phases):
        results[phase] = _run_phase(phase, config, out_dir, options, args, console)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in results[phase].metrics.items())
        console.print(f"{phase}: {figures or 'no evaluation'}; files: {out_dir / phase}", markup=False)
    if args.json:
        from fulltilt.records import VERSION, dumps

        write_json(args.json, dumps({"version": VERSION, "phases": results}, indent=1))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    for flag, smallest in (("--probe-epochs", 1), ("--cluster-epochs", 1), ("--clusters", 2)):
        check_at_least(args, flag, smallest)
    if not 0 < args.clear_share <= 1:
        raise UsageError(f"--clear-share {args.clear_share:g} must be above 0 and at most 1")


def _run_phase(
    phase: str, config: Config, out_dir: Path, options: PhaseOptions, args: argparse.Namespace, console: Console
) -> TrainResult:
    from fulltilt.engine.contrastive.phases import run_phase
    from fulltilt.listeners import EventLog, ProgressBar, build_loggers, tell_warnings

    folder = out_dir / phase
    listeners: list[Any] = [EventLog(folder), *build_loggers(config.run.loggers, folder)]
    listeners.append(tell_warnings if args.quiet else ProgressBar(console))
    return run_phase(
        phase,
        config,
        out_dir=out_dir,
        listeners=listeners,
        resume=args.resume,
        options=options,
        progress=None if args.quiet else _EncodingBar(),
    )


class _EncodingBar:
    """Images encoded so far, redrawn when it is told: no thread, a data worker may be forked later."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def __call__(self, part: str, done: int, total: int) -> None:
        from rich.progress import Progress

        if self._bar is None:
            self._bar = Progress(console=build_console(to_stderr=True), auto_refresh=False, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"encoding {part} images", total=total)
        self._bar.update(self._task, completed=done, refresh=True)
        if done == total:
            self._bar.stop()
            self._bar = None
