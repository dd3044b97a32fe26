"""``fulltilt tune``: search settings, optionally verify quality by training, print the result, write YAML if asked."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shlex
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import (
    add_memory_limit_argument,
    add_workload_arguments,
    build_console,
    describe_default_out,
    is_import_path,
    list_train_words,
    note_interruption,
    print_result,
    read_config,
    resolve_config_argument,
    warn,
    write_json,
)
from fulltilt.errors import ResultUnwrittenError, RunFolderError, StorageError, TrainingError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.cli._live_lines import RowCount
    from fulltilt.config import Config
    from fulltilt.tuner import TuneResult
    from fulltilt.tuner.search.progress import SearchEvent


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from fulltilt.tuner.question.default_budget import DEFAULT_BUDGET_S, DEFAULT_RUNS, QUICK_BUDGET_S

    add_workload_arguments(parser, metavar="CONFIG|module:object")
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", metavar="B", help="batch sizes to try")
    add("--num-workers", type=int, nargs="+", metavar="W", help="data worker counts to try")
    add("--steps", type=int, metavar="N", help="timed optimizer steps per trial, at least")
    add_memory_limit_argument(parser)
    add("--exhaustive", action="store_true", help="run the whole grid")
    add(
        "--named-only",
        action="store_true",
        help="vary only what is named: batch sizes, worker counts, AMP and pinning where the configuration asks, and "
        "its benchmark.levers; with --batch-sizes or --num-workers, run all combinations of these",
    )
    add("--quick", action="store_true", help="fewer and shorter trials, within 90 seconds")
    add(
        "--budget",
        metavar="6m",
        help=f"wall time of the search (default {DEFAULT_BUDGET_S / 60:g}m, or {DEFAULT_RUNS} more runs as long as the "
        f"first where that is more; {QUICK_BUDGET_S:g}s with --quick; none where the whole grid runs); rows in the run "
        "folder are free, the trainings of --verify come on top",
    )
    add("--deadline", metavar="10m", help="wall time of one trial (default 2m; 1m with --quick; 1m more over ranks)")
    add("--free-batch", action="store_true", help="let the effective batch change")
    add("--lr-rule", choices=["sqrt", "linear", "none"], default="sqrt", help="how lr follows the batch")
    add("--verify", action="store_true", help="train the settings as they were and the pick in turn, compare quality")
    add("--verify-pairs", type=int, metavar="N", help="trainings of each (default 3)")
    add("--verify-epochs", type=int, metavar="N", help="their length (default run.epochs)")
    add(
        "--apply", metavar="FILE", help="write the recommended settings into this YAML file, where their gain is proven"
    )
    add("--apply-unproven", action="store_true", help="write the fastest settings, though their gain is not proven")
    add("--out", metavar="DIR", help=f"run folder ({describe_default_out('tune')}); the same search resumes there")
    add("--json", metavar="F", help="write the result as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    from fulltilt.cli._live_lines import RowCount
    from fulltilt.tuner.answer.apply import check_target

    if args.apply:  # a file that cannot be written into is said before the search, not after it
        check_target(args.apply, searched=config)
    if args.apply_unproven and not args.apply:
        raise UsageError("--apply-unproven says what --apply may write, and --apply is not given; add --apply FILE")
    _check_verify(args)
    count = RowCount()
    with note_interruption(count.describe_kept):
        return _search(args, config, count)


def _search(args: argparse.Namespace, config: Config, count: RowCount) -> int:
    """Search, verify where that is asked for, and say what was found."""
    from fulltilt.cli._live import show_search
    from fulltilt.cli._live_lines import describe_left_out
    from fulltilt.records.run_folder import hold_folder
    from fulltilt.tuner import tune
    from fulltilt.tuner.answer.result import PAGE_FILE, RESULT_FILES, write_result
    from fulltilt.tuner.search.progress import SearchNoted, SearchStarted

    started: SearchStarted | None = None
    console = build_console(to_stderr=args.json == "-")
    with contextlib.nullcontext() if args.quiet else show_search(console) as view:

        def tell(event: SearchEvent) -> None:
            nonlocal started
            started = event if isinstance(event, SearchStarted) else started
            count(event)
            if view is not None:
                view(event)
            elif isinstance(event, SearchNoted):
                warn([event.message])

        unwritten: StorageError | None = None
        try:
            result = tune(
                config,
                batch_sizes=args.batch_sizes,
                num_workers=args.num_workers,
                steps=args.steps,
                memory_limit=args.memory_limit,
                exhaustive=args.exhaustive,
                named_only=args.named_only,
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
    if args.verbose:
        print_details(console, document)
    applied = apply_picked(args, result, config) if args.apply and unwritten is None else []
    files = ", ".join([str(folder / PAGE_FILE), *(name for name in RESULT_FILES if name != PAGE_FILE)])
    how = "" if args.apply else suggest_apply(args, result, config)
    _print_lines(console, ["", *applied] if applied else ())  # before the verdict: what stands last is read first
    is_changed = args.apply and unwritten is None and read_config(args).digest != config.digest
    if is_changed:
        where = "it needs another --out" if args.out else "in a folder of its own"
        console.print(f"· the same command now searches from these settings: {where}")
    left_out = None if is_changed else describe_left_out(started)
    print_verdict(console, document, files="" if unwritten else files, apply=how, left_out=left_out, args=args)
    if args.quiet and applied:
        print_result(console, applied[0].rstrip(":"))
        warn(line for line in applied if line.startswith(f"{args.apply}: "))
    write_json(args.json, result.to_json_text())  # what was measured is said before that it could not be kept
    if unwritten is not None:
        raise unwritten
    return 0


def _check_verify(args: argparse.Namespace) -> None:
    """Raise a UsageError, before the search, where the flags of ``--verify`` cannot be followed."""
    for flag, value, smallest, remedy in (
        ("--verify-pairs", args.verify_pairs, 2, "an interval over pairs needs at least 2"),
        ("--verify-epochs", args.verify_epochs, 1, "give at least 1"),
    ):
        if value is not None and not args.verify:
            raise UsageError(f"{flag} {value} says how --verify trains, and --verify is not given; add it")
        if value is not None and value < smallest:
            raise UsageError(f"{flag} {value}: {remedy}")


def _verify(args: argparse.Namespace, config: Config, result: TuneResult, console: Console) -> TuneResult:
    """Train both plans in turn, and put the verdict into the result; why there is none is said there too."""
    from fulltilt.report import format_duration
    from fulltilt.tuner.answer.apply import plan_changes
    from fulltilt.tuner.answer.verify import N_PAIRS, VERIFY_FOLDER, add_verification, run_verification

    if result.baseline is None or result.baseline.status != "ok":
        return _without_verification(
            result, "the settings as they were did not run: there is nothing to hold it against"
        )
    settings = plan_changes(result, config, result.picks.best, searched=config).values
    if not settings or result.picks.best.trial.plan == result.user_plan:
        return _without_verification(result, "the recommended plan is the user's own: there is nothing to compare")

    folder, start_s = Path(result.folder or ".") / VERIFY_FOLDER, time.monotonic()

    def tell(arm: str, seed: int, n_done: int, n_planned: int) -> None:
        each_s = (time.monotonic() - start_s) / max(n_done, 1)
        left = f", about {format_duration(each_s * (n_planned - n_done))} left" if n_done else f"; logs in {folder}"
        console.print(f"verify: training {n_done + 1} of {n_planned}, {arm}, seed {seed}{left}", style="dim")

    try:
        verification = run_verification(
            list_train_words(args, config.source or args.config_flag or args.config),
            settings,
            folder=folder,
            seed=config.run.seed,
            n_pairs=args.verify_pairs or N_PAIRS,
            epochs=args.verify_epochs,
            on_run=tell,
        )
    except (TrainingError, StorageError) as error:
        return _without_verification(result, str(error))
    return add_verification(result, verification)


def _without_verification(result: TuneResult, reason: str) -> TuneResult:
    notes = (*result.notes, f"--verify came to no verdict: {reason}")
    return dataclasses.replace(result, notes=notes, null_reasons={**result.null_reasons, "verification": reason})


def print_verdict(
    console: Console,
    document: Mapping[str, Any],
    *,
    files: str,
    apply: str,
    left_out: str | None,
    args: argparse.Namespace,
) -> None:
    """Print the screen that ends a search, the verdict first; with ``--quiet`` that and, on stderr, warnings."""
    from fulltilt.report.verdict import build_screen, describe_verdict, list_warnings

    source = " ".join(list_train_words(args, resolve_config_argument(args)))
    if args.quiet:
        print_result(console, describe_verdict(document))
        warn(list_warnings(document, source=source))
        return
    first, *rest = build_screen(document, files=files, apply=apply, source=source, left_out=left_out)
    console.print()
    console.print(first, style="bold", soft_wrap=True)
    for line in rest:
        console.print(line, soft_wrap=True)


def suggest_apply(args: argparse.Namespace, result: TuneResult, config: Config) -> str:
    """Return the command that writes the settings into the configuration's own file, or trains with them."""
    from fulltilt.tuner.answer.apply import plan_changes

    source = resolve_config_argument(args)
    if not is_import_path(source):
        forced = [] if result.picks.recommended.proven else ["--apply-unproven"]
        return shlex.join(["fulltilt", *args.argv, "--apply", source, *forced])
    settings = plan_changes(result, config, result.picks.recommended, searched=config).values
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return " ".join(["fulltilt", "train", *list_train_words(args, source), *map(shlex.quote, words)])


def print_details(console: Console, document: Mapping[str, Any]) -> None:
    """Print the table, the picks with their rules, and the notes."""
    from fulltilt.report.summary import (
        describe_advice,
        describe_hints,
        describe_marks,
        describe_search,
        list_picks,
    )
    from fulltilt.report.table import build_trials_table
    from fulltilt.report.verdict import describe_epoch

    def print_section(title: str, lines: Iterable[str | None]) -> None:
        told = [line for line in lines if line]
        if told:
            console.print(f"\n{title}", style="bold")
            _print_lines(console, [f"· {line}" for line in told])

    console.print()
    console.print(build_trials_table(document["trials"], marked=_mark_picks(document), width=console.width))
    legend = describe_marks(document)
    if legend:
        console.print(legend, style="dim")
    print_section("Search", [describe_search(document), *describe_epoch(document)])
    for title, _, lines in list_picks(document):
        console.print(f"\n{title}", style="bold")
        for line in lines:
            console.print(f"  {line}")
    print_section("Notes", [*describe_hints(document), *document.get("notes", ())])
    print_section("What would make it faster still", describe_advice(document))


def _mark_picks(document: Mapping[str, Any]) -> dict[str, str]:
    """Return row id → the names of its picks."""
    from fulltilt.report.summary import name_picks

    names = name_picks(document)
    is_one = len(names) == 1
    return {id: "every pick" if is_one and len(own) > 1 else ", ".join(own) for id, own in names.items()}


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        style = "green" if line.startswith("+") else "red" if line.startswith("-") else ""
        console.print(line, style=style, soft_wrap=not console.is_terminal)


def apply_picked(args: argparse.Namespace, result: TuneResult, searched: Config) -> list[str]:
    """Write the pick into the file where it is proven, or asked for all the same; return what to say of it."""
    from fulltilt.tuner.answer.apply import apply_result

    path, picks = args.apply, result.picks
    pick = picks.best if args.apply_unproven else picks.recommended
    has_worse = result.verification is not None and result.verification.verdict == "learns worse"
    is_sure = picks.unproven is None and picks.recommended.proven
    if picks.unproven is None and not is_sure and picks.recommended.trial.plan == result.user_plan:
        return [f"{path} stays as it is: no other plan came out faster"]
    doubt = "" if is_sure else "the fastest plan learned worse" if has_worse else "no gain is proven"
    if doubt and not args.apply_unproven:
        return [f"{path} stays as it is: {doubt} (--apply-unproven writes the best other plan all the same)"]
    applied = apply_result(result, path, pick=pick, searched=searched)
    notes = [f"{path}: {note}" for note in applied.notes]
    if not applied.diff:
        return [f"{path} holds the recommended settings already, as far as they apply to it", *notes]
    return [f"written into {path}{f', though {doubt}' if doubt else ''}:", *applied.diff.splitlines(), *notes]
