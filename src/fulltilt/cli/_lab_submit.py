"""``fulltilt lab submit``: queue the points of a grid and run them on this machine."""

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from fulltilt.cli._shared import (
    build_console,
    is_import_path,
    note_interruption,
    print_result,
    resolve_config_argument,
    write_json,
)
from fulltilt.engine.interrupt import StopRequest, catch_signals
from fulltilt.errors import UsageError
from fulltilt.lab import listing
from fulltilt.lab.dry_run import run_dry
from fulltilt.lab.local import LocalExecutor, Slot, build_slots
from fulltilt.lab.points import Grid, read_grid
from fulltilt.lab.records import Event, Experiment
from fulltilt.lab.running import STOP_SIGNALS, recover, run_queue
from fulltilt.lab.states import OVER
from fulltilt.lab.store import Store, open_store
from fulltilt.records.run_folder import hold_folder
from fulltilt.report import format_duration

REDRAW_S = 1.0
TOLD = ("running", "succeeded", "failed", "cancelled", "queued")  # states that are worth a line


def run_submit(args: argparse.Namespace) -> int:
    """Queue what is new of the grid and run what waits; return 1 where an experiment did not succeed."""
    if not args.local:
        raise UsageError("where the experiments run has to be said; there is --local: this machine, in the foreground")
    source = resolve_config_argument(args)
    if is_import_path(source):
        raise UsageError(f"a grid is a YAML file, and {source} is none; fulltilt train {source} runs it")
    lab, began_s = Path(args.lab), time.monotonic()
    grid = read_grid(source, args.overrides)
    slots = build_slots(grid.pool)
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    with hold_folder(lab), contextlib.closing(open_store(lab, create=True)) as store:
        executor = LocalExecutor(lab, slots)
        recover(lab, store, executor)
        mine = _queue(args, store, grid, slots, console)
        n_waiting = _announce(console, lab, store, mine, slots)
        if n_waiting:
            _run(console, lab, store, executor, mine)
        shown = [found for found in store.read_experiments() if found.id in mine]
        own = store.read_ids(grid.source, {point.digest for point in grid.points}).values()
    write_json(args.json, listing.build_document(lab, shown))
    print_result(console, _describe_end(shown, n_waiting, time.monotonic() - began_s))
    if best := listing.describe_best([found for found in shown if found.id in own]):
        console.print(best)
    console.print(listing.build_table(lab, shown, n_rows=None if args.verbose else listing.N_ROWS))
    return 0 if all(found.state == "succeeded" for found in shown) else 1


def _queue(args: argparse.Namespace, store: Store, grid: Grid, slots: Sequence[Slot], console: Console) -> set[str]:
    """Add the points that are new to the queue, and return the ids of all that this command is about."""
    digests = {point.digest for point in grid.points}
    known = store.read_ids(grid.source, digests)
    new = [point for point in grid.points if point.digest not in known]
    if new:
        run_dry(grid, new, args.overrides, slots[0], Path(args.lab), tell=console.print)
    store.add(grid.source, grid.points, args.overrides)
    mine = set(store.read_ids(grid.source, digests).values())
    if args.retry:
        for found in store.read_experiments(states=("failed", "cancelled")):
            if found.id in mine:
                store.advance("retry", found.newest)
    if new and known:
        console.print(f"{len(new)} of {len(grid.points)} points are new")
    return mine | {found.id for found in store.read_experiments() if found.state not in OVER}


def _announce(console: Console, lab: Path, store: Store, mine: set[str], slots: Sequence[Slot]) -> int:
    """Say how many wait, and for what; return how many."""
    n_waiting = len(store.read_experiments(states=("queued",)))
    where = ", ".join(slot.name for slot in slots)
    if slots[0].n_threads and len(slots) > 1:
        where += f" (there is no GPU: these are slots on the CPU, threads for each: {slots[0].n_threads})"
    if n_waiting:
        said = f"{n_waiting} of {len(mine)} experiments wait in {lab}, at most {len(slots)} run at once on {where}"
        console.print(said, soft_wrap=True)
    return n_waiting


def _run(console: Console, lab: Path, store: Store, executor: LocalExecutor, mine: set[str]) -> None:
    """Run what is queued; a signal is delivered once all is settled, with a note of what is kept."""

    def describe_kept() -> str:
        left = [found for found in store.read_experiments() if found.id in mine]
        return f"{listing.describe_counts(left)}, kept in {lab}; the same command goes on from there"

    with note_interruption(describe_kept):
        caught = catch_signals(STOP_SIGNALS, is_patient=True)
        with caught as stop, QueueView(console, lab, store, mine, stop).show() as tell:
            run_queue(lab, store, executor, stop=stop, tell=tell)
        stop.deliver()


def _describe_end(shown: Sequence[Experiment], n_ran: int, seconds: float) -> str:
    """Return the result in one sentence."""
    others = [found for found in shown if found.state != "succeeded"]
    said = f"{len(shown) - len(others)} of {len(shown)} experiments succeeded"
    if not others:
        return said + (f" in {format_duration(seconds)}" if n_ran else " before; there was nothing to start")
    failed = next((found for found in others if found.state == "failed"), None)
    logs = f" (see fulltilt lab logs {failed.id})" if failed else ""
    return f"{said}, {listing.describe_counts(others)}{logs}; --retry tries again"


class QueueView:
    """Shows the progress of the experiments ``ids``; the queue loop calls it repeatedly.

    The table is drawn by these calls and by no thread: a process that forks should have one.
    """

    def __init__(self, console: Console, lab: Path, store: Store, ids: set[str], stop: StopRequest):
        self._console, self._lab, self._store, self._ids, self._stop = console, lab, store, ids, stop
        self._seq = max((event.seq for event in store.read_events()), default=0)
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._has_told_stop = False

    @contextlib.contextmanager
    def show(self) -> Iterator["QueueView"]:
        """Show a live table inside the block on a terminal; calls of the view redraw it."""
        if not (self._console.is_interactive and self._console.file.isatty()) or self._console.quiet:
            yield self
            return
        with Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop") as self._live:
            yield self

    def __call__(self) -> None:
        try:
            self._tell()
        except OSError:
            if self._stop.signal_number is None:
                raise
            self._console.quiet = True  # the terminal is gone; the trainings shall save nevertheless

    def _tell(self) -> None:
        if self._stop.signal_number is not None and not self._has_told_stop:
            self._has_told_stop = True
            said = "waiting until the trainings that run have saved; the same signal once more ends them at once"
            self._console.print(said, style="yellow", soft_wrap=True)
        if self._live is None:
            self._print_changes()
        elif time.monotonic() - self._drawn_s >= REDRAW_S:
            shown = [found for found in self._store.read_experiments() if found.id in self._ids]
            table = listing.build_table(self._lab, shown)
            table.title, table.title_justify = listing.describe_counts(shown), "left"
            self._live.update(table, refresh=True)
            self._drawn_s = time.monotonic()

    def _print_changes(self) -> None:
        for event in self._store.read_events(after=self._seq):
            self._seq = event.seq
            if event.state in TOLD:
                (experiment,) = self._store.read_experiments(id=event.experiment)
                self._console.print(_describe_change(event, experiment), soft_wrap=True)


def _describe_change(event: Event, experiment: Experiment) -> str:
    again = f", attempt {event.attempt}" if event.attempt > 1 else ""
    said = {
        "start": f"runs on {', '.join(experiment.devices)}{again}",
        "commit": f"succeeded: {listing.describe_metrics(experiment.metrics)}",
        "fail": f"failed: {experiment.reason}",
        "requeue": f"is queued again: {experiment.reason}",
    }
    return f"{event.experiment} ({listing.describe_point(experiment)}) {said.get(event.arrow, f'is {event.state}')}"
