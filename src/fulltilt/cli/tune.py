"""``fulltilt tune``: the search, the table, the picks, the report."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import (
    add_config_argument,
    add_data_path_argument,
    add_device_argument,
    add_memory_limit_argument,
    build_console,
    read_config,
    write_json,
)
from fulltilt.cli._signals import Terminated
from fulltilt.errors import ResultUnwrittenError, RunFolderError, StorageError, TrainingError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.cli._live import RowCount
    from fulltilt.config import Config
    from fulltilt.tuner import TuneResult
    from fulltilt.tuner.search.progress import SearchEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser, metavar="CONFIG|module:object")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    add_data_path_argument(parser)
    add_device_argument(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", metavar="B", help="batch sizes to try")
    parser.add_argument("--num-workers", type=int, nargs="+", metavar="W", help="data worker counts to try")
    parser.add_argument("--steps", type=int, metavar="N", help="timed optimizer steps per trial, at least")
    add_memory_limit_argument(parser)
    parser.add_argument("--exhaustive", action="store_true", help="run the whole grid")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter trials, within 90 seconds")
    parser.add_argument(
        "--budget",
        metavar="6m",
        help="wall time of the search; rows in the run folder are free, the trainings of --verify come on top",
    )
    parser.add_argument(
        "--deadline", metavar="10m", help="wall time of one trial (default 2m; 1m with --quick; 1m more over ranks)"
    )
    parser.add_argument("--free-batch", action="store_true", help="let the effective batch change")
    parser.add_argument(
        "--lr-rule", choices=["sqrt", "linear", "none"], default="sqrt", help="how lr follows the batch"
    )
    parser.add_argument(
        "--verify", action="store_true", help="train the settings as they were and the pick in turn, compare quality"
    )
    parser.add_argument("--verify-pairs", type=int, metavar="N", help="trainings of each (default 3)")
    parser.add_argument("--verify-epochs", type=int, metavar="N", help="their length (default run.epochs)")
    parser.add_argument("--apply", metavar="FILE", help="write the recommended settings into this YAML file")
    parser.add_argument(
        "--out", metavar="DIR", help="run folder (default runs/tune/NAME); the same search resumes there"
    )
    parser.add_argument("--json", metavar="F", help="write the result as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    from fulltilt.cli._live import RowCount

    if args.apply:  # a file that cannot be written into is said before the search, not after it
        from fulltilt.tuner.answer.apply import check_target

        check_target(args.apply, searched=config)
    _check_verify(args)
    count = RowCount()
    try:
        return _search(args, config, count)
    except (KeyboardInterrupt, Terminated) as interruption:
        interruption.add_note(count.describe_kept())
        raise


def _search(args: argparse.Namespace, config: Config, count: RowCount) -> int:
    """Search, verify where that is asked for, and say what was found."""
    from fulltilt.cli._live import show_search
    from fulltilt.records.run_folder import hold_folder
    from fulltilt.tuner import tune
    from fulltilt.tuner.answer.result import RESULT_FILES, write_result

    console = build_console(to_stderr=args.json == "-")
    with show_search(console) as view:

        def tell(event: SearchEvent) -> None:
            count(event)
            view(event)

        unwritten: StorageError | None = None
        try:
            result = tune(
                config,
                batch_sizes=args.batch_sizes,
                num_workers=args.num_workers,
                steps=args.steps,
                memory_limit=args.memory_limit,
                exhaustive=args.exhaustive,
                quick=args.quick,
                budget=args.budget,
                deadline=args.deadline,
                free_batch=args.free_batch,
                lr_rule=args.lr_rule,
                out=args.out,
                on_event=tell,
            )
        except ResultUnwrittenError as error:  # what was measured is said before that it could not be kept
            result, unwritten = error.result, error
    folder = Path(result.folder or ".")
    if args.verify and unwritten is not None:
        result = _without_verification(result, str(unwritten))
    elif args.verify:
        try:
            with hold_folder(folder):
                result = _verify(args, config, result, console)
                write_result(result, folder)
        except RunFolderError as error:  # another search began there since: its figures and ours would suffer
            result = _without_verification(result, str(error))
        except StorageError as error:
            unwritten = error
    document = result.to_document()
    print_result(console, document)
    if args.json:
        write_json(args.json, result.to_json_text())
    if unwritten is not None:
        raise unwritten
    console.print("files: " + ", ".join(str(folder / name) for name in RESULT_FILES), markup=False)
    if args.apply:
        print_applied(console, result, args.apply, config)
        if read_config(args).digest != config.digest:
            _print_lines(console, ["the same command now searches from these settings: it needs another --out"])
    return 0


def _check_verify(args: argparse.Namespace) -> None:
    """Said before the search, not after it."""
    for flag, value in (("--verify-pairs", args.verify_pairs), ("--verify-epochs", args.verify_epochs)):
        if value is not None and not args.verify:
            raise UsageError(f"{flag} {value} says how --verify trains, and --verify is not given; add it")
    if args.verify_pairs is not None and args.verify_pairs < 2:
        raise UsageError(f"--verify-pairs {args.verify_pairs}: an interval over pairs needs at least 2")
    if args.verify_epochs is not None and args.verify_epochs < 1:
        raise UsageError(f"--verify-epochs {args.verify_epochs}: give at least 1")


def _verify(args: argparse.Namespace, config: Config, result: TuneResult, console: Console) -> TuneResult:
    """Train both plans in turn, and put the verdict into the result; why there is none is said there too."""
    from fulltilt.report import format_duration
    from fulltilt.tuner.answer.apply import plan_changes
    from fulltilt.tuner.answer.verify import N_PAIRS, VERIFY_FOLDER, run_verification

    settings = plan_changes(result, config, searched=config).values
    if not settings or result.picks.recommended.trial.plan == result.user_plan:
        return _without_verification(result, "the recommended plan is the user's own: there is nothing to compare")

    folder, start_s = Path(result.folder or ".") / VERIFY_FOLDER, time.monotonic()

    def tell(arm: str, seed: int, n_done: int, n_planned: int) -> None:
        each_s = (time.monotonic() - start_s) / max(n_done, 1)
        left = f", about {format_duration(each_s * (n_planned - n_done))} left" if n_done else f"; logs in {folder}"
        console.print(
            f"verify: training {n_done + 1} of {n_planned}, {arm}, seed {seed}{left}", style="dim", markup=False
        )

    try:
        verification = run_verification(
            _list_train_words(args, config),
            settings,
            folder=folder,
            seed=config.run.seed,
            n_pairs=args.verify_pairs or N_PAIRS,
            epochs=args.verify_epochs,
            on_run=tell,
        )
    except (TrainingError, StorageError) as error:
        return _without_verification(result, str(error))
    reasons = {name: reason for name, reason in result.null_reasons.items() if name != "verification"}
    return dataclasses.replace(result, verification=verification, null_reasons=reasons)


def _without_verification(result: TuneResult, reason: str) -> TuneResult:
    notes = (*result.notes, f"--verify came to no verdict: {reason}")
    return dataclasses.replace(result, notes=notes, null_reasons={**result.null_reasons, "verification": reason})


def _list_train_words(args: argparse.Namespace, config: Config) -> list[str]:
    """The words that make ``fulltilt train`` train what this search was about."""
    words = [config.source or args.config_flag or args.config, *args.overrides]
    words += ["--data-path", args.data_path] if args.data_path else []
    return words + (["--device", args.device] if args.device else [])


def print_result(console: Console, document: Mapping[str, Any]) -> None:
    """The table, the picks and the notes, for people."""
    from fulltilt.report.outcome import describe_outcome
    from fulltilt.report.summary import (
        PICK_TITLES,
        describe_advice,
        describe_hints,
        describe_marks,
        describe_pick,
        describe_same_pick,
        describe_search,
        describe_verification,
    )
    from fulltilt.report.table import build_trials_table

    console.print()
    console.print(build_trials_table(document["trials"], marked=_mark_picks(document), width=console.width))
    legend = describe_marks(document)
    if legend:
        console.print(legend, style="dim", markup=False)
    console.print("\n[bold]What it comes to[/]")
    _print_lines(console, [*describe_outcome(document), describe_verification(document), describe_search(document)])
    shown: dict[str, Mapping[str, Any]] = {}
    for name, title in PICK_TITLES.items():
        pick = document["picks"].get(name)
        if not pick:
            continue
        console.print(f"\n[bold]{title}[/]")
        first = shown.setdefault(pick["id"], pick)
        same = [f"the same plan; {describe_same_pick(pick, first)}"] if first is not pick else None
        for line in same or describe_pick(pick, document["trials"]):
            console.print(f"  {line}", markup=False)
    notes = [*describe_hints(document), *document.get("notes", ())]
    if notes:
        console.print("\n[bold]Notes[/]")
        _print_lines(console, notes)
    advice = describe_advice(document)
    if advice:
        console.print("\n[bold]What would make it faster still[/]")
        _print_lines(console, advice)


def _mark_picks(document: Mapping[str, Any]) -> dict[str, str]:
    """Row id → the picks it is."""
    from fulltilt.report.summary import name_picks

    names = name_picks(document)
    is_one = len(names) == 1
    return {id: "every pick" if is_one and len(own) > 1 else ", ".join(own) for id, own in names.items()}


def _print_lines(console: Console, lines: Iterable[str | None]) -> None:
    for line in lines:
        if line:
            console.print(f"· {line}", markup=False, soft_wrap=not console.is_terminal)


def _name_doubt(result: TuneResult) -> str:
    """What keeps the pick from being a proven gain over settings that ran as they were; nothing where it is one."""
    if result.baseline is None or result.baseline.status != "ok":
        return ""
    if result.savings is None:
        return ", though too few runs were made to tell it from the settings as they were"
    if result.savings.verdict == "no gain":
        return ", though this search could not prove that it is faster than the settings as they were"
    return ""


def print_applied(console: Console, result: TuneResult, path: str, searched: Config) -> None:
    from fulltilt.tuner.answer.apply import apply_result

    applied = apply_result(result, path, searched=searched)
    if applied.diff:
        console.print(f"\nwritten into {path}{_name_doubt(result)}:", markup=False)
    else:
        console.print(f"{path} holds the recommended settings already, as far as they apply to it", markup=False)
    for line in applied.diff.splitlines():
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
        console.print(f"  {line}", style=style, markup=False)
    _print_lines(console, [f"{path}: {note}" for note in applied.notes])
