"""``fulltilt train``: train from a configuration, or only profile its data path or its steps."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._profile import run_data_profile, run_step_profile
from fulltilt.cli._shared import (
    add_memory_limit_argument,
    add_workload_arguments,
    build_console,
    describe_default_out,
    describe_saved,
    note_interruption,
    print_result,
    read_config_to_train,
    read_memory_limit_bytes,
    write_json,
)
from fulltilt.errors import FulltiltError, UsageError
from fulltilt.lab.runner.order import MARK

if TYPE_CHECKING:
    from fulltilt.config import Config
    from fulltilt.engine.loop.endings import TrainResult
    from fulltilt.records import Event, Listener


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload_arguments(parser)
    parser.add_argument("--epochs", type=int, metavar="N", help="passes over the training set (run.epochs)")
    add_memory_limit_argument(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the folder")
    parser.add_argument("--out", metavar="DIR", help=f"where to write ({describe_default_out('train')})")
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")
    parser.add_argument("--metrics", metavar="DIR", help="also write guide 004's metrics files there")
    parser.add_argument("--tensorboard", action="store_true", help="short for adding tensorboard to run.loggers")
    parser.add_argument(
        "--profile-data", action="store_true", help="time every part of the data path, slowest first, and train nothing"
    )
    parser.add_argument(
        "--profile-steps",
        type=int,
        metavar="N",
        help="put N steps under torch's profiler: costliest operators, a trace, a memory snapshot; train nothing",
    )


def run(args: argparse.Namespace) -> int:
    here = Path.cwd()  # code of the model or the data may change it, as early as it is imported
    config = read_config_to_train(args)
    if args.profile_data:
        return run_data_profile(config, json_to=args.json)
    if args.profile_steps is not None:
        return run_step_profile(config, n_steps=args.profile_steps, out=args.out, json_to=args.json)
    from fulltilt.records.run_folder import find_folder_obstacle

    if args.metrics and (obstacle := find_folder_obstacle(here / args.metrics)):
        raise UsageError(f"--metrics: {obstacle.partition(';')[0]}; name a folder")
    folders: list[Path] = []  # that checkpoints are written into, as soon as they are known
    with note_interruption(lambda: describe_saved(folders)):
        from fulltilt.engine.loop.train import train

        out_dir, said, resume = (Path(args.out), None, args.resume) if args.out else _choose_folder(args, config)
        shown, out_dir = out_dir, here / out_dir
        folders.append(out_dir)
        result = train(
            config,
            out_dir=out_dir,
            listeners=_build_listeners(args, config, out_dir, said),
            resume=resume,
            memory_limit_bytes=read_memory_limit_bytes(args),
        )
        return _tell(args, result, out_dir, shown)


def _choose_folder(args: argparse.Namespace, config: Config) -> tuple[Path, str | None, bool]:
    """Choose the folder of a run → the folder, what to say, and whether the run goes on."""
    from fulltilt.engine.loop.opening import find_run_folders
    from fulltilt.engine.ranks.world import is_rank
    from fulltilt.report.training import read_end

    usual = Path("runs") / "train" / config.run_name
    if is_rank():  # under torchrun: all of them have to choose the same
        return usual, None, args.resume
    found = find_run_folders(usual, config)
    n_epochs, end = (None, "") if found.own is None else read_end(found.own)
    if found.own is not None and (args.resume or not (found.is_aged or end == "finished")):
        folder = found.own
    else:
        folder = usual if args.resume else found.free  # what cannot be resumed is refused, with what changed
    was_left = folder == found.own and n_epochs == config.run.epochs and end in ("", "interrupted")
    return folder, found.explain(folder), args.resume or was_left


def _build_listeners(args: argparse.Namespace, config: Config, out_dir: Path, said: str | None) -> list[Listener]:
    from fulltilt.listeners import EventLog, MetricsTracker, ProgressBar, build_loggers

    loggers = [*config.run.loggers, *(["tensorboard"] if args.tensorboard else [])]
    listeners = [EventLog(out_dir), *build_loggers(loggers, out_dir)]
    if args.metrics:
        listeners.append(MetricsTracker(args.metrics))
    console, unsaid = build_console(to_stderr=args.json == "-"), [said] if said else []

    def tell_folder(_: Event) -> None:  # not before the run is built: what is refused is in no folder
        while unsaid:
            console.print(unsaid.pop(), soft_wrap=True)

    return [*listeners, tell_folder, ProgressBar(console)]


def _tell(args: argparse.Namespace, result: TrainResult, out_dir: Path, shown: Path) -> int:
    """Print what training came to, in one sentence, and where its files are."""
    from fulltilt.cli.report import write_training_report
    from fulltilt.engine.ranks.world import is_first_rank
    from fulltilt.listeners import list_headlines
    from fulltilt.report import format_duration

    if not is_first_rank():  # started by torchrun, beside the one that tells
        return 0
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    try:
        write_training_report([out_dir])
    except FulltiltError as error:  # the training is done and saved; its page can be drawn later
        console.print(f"note: no report was written: {error}")
    figures = [f"{name} {value:.4g}" for name, value in list_headlines(result.metrics)]
    if not figures and result.loss is not None:
        figures = [f"training loss {result.loss:.4g}"]
    took = f"{format_duration(result.training_seconds)} of training at {result.samples_per_s:,.0f} samples/s"
    loss = result.metrics.get("loss", 0.0)
    but = "" if math.isfinite(loss) else f", but the validation loss is {loss}"
    said = f"{result.reason.capitalize()}{but}: {', '.join(figures) or 'no evaluation'}"
    print_result(console, f"{said} after {result.step:,} step{'s' if result.step != 1 else ''}, {took}.")
    for name, value in result.metrics.items() if args.verbose else ():
        console.print(f"  {name} {value:.6g}")
    if MARK not in os.environ:  # the lab takes the files elsewhere
        console.print(f"files: {shown}", soft_wrap=True)
    write_json(args.json, result)  # what was trained is said before that it could not be written
    return 0
