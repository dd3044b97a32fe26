"""``fulltilt lab submit``: queue the points of a grid, and with ``--local`` run them on this machine."""

from __future__ import annotations

import argparse
import contextlib
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from fulltilt.errors import RunFolderError, UsageError
from fulltilt.lab import listing
from fulltilt.lab.client import Client, connect
from fulltilt.lab.dry_run import run_dry
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.lab import RUNNER_LOGS
from fulltilt.lab.points import Grid, read_grid
from fulltilt.lab.serving import find_server, open_lab, serve
from fulltilt.records.run_folder import hold_folder
from fulltilt.report import format_duration

if TYPE_CHECKING:
    from fulltilt.lab.coordinator import Coordinator

TURN_S = 0.2
REDRAW_S = 1.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOLD = ("running", "succeeded", "failed", "cancelled", "held", "backoff", "queued")  # states that are worth a line
UNDER_WAY = ("queued", "backoff", "leased", "running", "cancelling", "finalizing")


def run_submit(args: argparse.Namespace) -> int:
    """Queue what is new of the grid, and run what waits here; return 1 unless all succeed."""
    from fulltilt.cli.lab import find_address

    source = resolve_config_argument(args)
    if is_import_path(source):
        raise UsageError(f"a grid is a YAML file, and {source} is none; fulltilt train {source} runs it")
    grid = read_grid(source, args.overrides)
    if args.local:
        return _run_here(args, source, grid)
    address = find_address(args)
    if address is None and find_server(Path(args.lab)) is None:
        raise UsageError(
            f"no server of the lab {args.lab} runs; --local runs the experiments here, fulltilt lab serve starts a "
            "server, and --url names one"
        )
    with connect(Path(args.lab), address=address) as client:
        done = client.submit(Path(source), args.overrides, priority=args.priority, retry=args.retry)
        document = client.get("/api/experiments", sweep=done["sweep"])
        document["experiments"] = [each for each in document["experiments"] if each["id"] in set(done["ids"])]
    write_json(args.json, document)
    if args.json != "-":
        n_again = done["n_retried"]
        n_queued = done["n_new"] + n_again
        again = f", {n_again} of them again with the code as it is now" if n_again else ""
        n_old = len(done["ids"]) - n_queued
        known = f", {n_old} were there before" if n_old else ""
        print_result(build_console(), f"{n_queued} experiments are queued{again}{known}; fulltilt lab list shows them")
    return 0


def _run_here(args: argparse.Namespace, source: str, grid: Grid) -> int:
    folder, began_s = Path(args.lab), time.monotonic()
    console = build_console(to_stderr=args.json == "-", is_screen=True)
    executor = LocalExecutor(grid.pool, logs=folder / RUNNER_LOGS)
    try:
        held = hold_folder(folder)
        with held, open_lab(folder, create=True) as lab, serve(lab, [executor]) as (address, coordinator):
            client = Client(None, address)
            known = lab.store.read_ids(grid.source, {point.digest for point in grid.points})
            if new := [point for point in grid.points if point.digest not in known]:
                run_dry(grid, new, args.overrides, executor.slots[0], folder, tell=console.print)
            done = client.submit(Path(source), args.overrides, priority=args.priority, retry=args.retry)
            view = QueueView(console, client, done, folder)
            n_waiting = view.announce(executor)
            if n_waiting:
                _wait(view, coordinator)
            shown = view.read()
    except RunFolderError:
        if find_server(folder) is not None:
            raise UsageError(f"{folder} is served already; leave --local out, and the grid is queued there") from None
        raise
    write_json(args.json, {"version": 1, "experiments": shown})
    print_result(console, _describe_end(shown, n_waiting, time.monotonic() - began_s))
    if best := listing.describe_best([each for each in shown if each["id"] in done["ids"]]):
        console.print(best)
    n_rows = None if args.verbose else listing.N_ROWS
    console.print(listing.build_table(shown, width=console.width, n_rows=n_rows))
    return 0 if all(each["state"] == "succeeded" for each in shown) else 1


def _wait(view: QueueView, coordinator: Coordinator) -> None:
    """Wait until nothing is under way; a signal is delivered when all is settled, with a note."""
    with note_interruption(view.describe_kept):
        with catch_signals(STOP_SIGNALS, is_patient=True) as stop, view.show(stop):
            while not coordinator.is_idle():
                view()
                if stop.signal_number is not None:
                    coordinator.is_draining = True
                    coordinator.end_all(is_urgent=stop.is_urgent)
                time.sleep(TURN_S)
            view()
        stop.deliver()


def _describe_end(shown: list[dict[str, Any]], n_ran: int, seconds: float) -> str:
    """Return the result in one sentence."""
    others = [each for each in shown if each["state"] != "succeeded"]
    said = f"{len(shown) - len(others)} of {len(shown)} experiments succeeded"
    if not others:
        return said + (f" in {format_duration(seconds)}" if n_ran else " before; there was nothing to start")
    failed = next((each for each in others if each["state"] == "failed"), None)
    logs = f" (see fulltilt lab logs {failed['id']})" if failed else ""
    return f"{said}, {listing.describe_counts(others)}{logs}; --retry tries again"


class QueueView:
    """Shows the progress of what a command is about: its own experiments, and all others that wait.

    The table is drawn by calls and by no thread: a process that forks should have one.
    """

    def __init__(self, console: Console, client: Client, done: Mapping[str, Any], folder: Path):
        self._console, self._client, self._folder = console, client, folder
        self._seq = client.get("/api/status")["last_event"]
        waiting = client.get("/api/experiments", state=list(UNDER_WAY))["experiments"]
        self._ids = {*done["ids"], *(each["id"] for each in waiting)}
        self._done = done
        self._stop: StopRequest | None = None
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._has_told_stop = False

    def read(self) -> list[dict[str, Any]]:
        return [each for each in self._client.get("/api/experiments")["experiments"] if each["id"] in self._ids]

    def describe_kept(self) -> str:
        return f"{listing.describe_counts(self.read())}, kept in {self._folder}; the same command goes on from there"

    def announce(self, executor: LocalExecutor) -> int:
        """Say how many wait, and for what; return how many."""
        found = self.read()
        n_waiting = sum(each["state"] in UNDER_WAY for each in found)
        slots, n_new, n_all = executor.slots, self._done["n_new"], len(self._done["ids"])
        if n_new and n_new < n_all:
            self._console.print(f"{n_new} of {n_all} points are new")
        if n_again := self._done["n_retried"]:
            self._console.print(f"{n_again} of {n_all} run again with the code as it is now")
        where = ", ".join(slot.name for slot in slots)
        if slots[0].n_threads and len(slots) > 1:
            where += f" (there is no GPU: these are slots on the CPU, threads for each: {slots[0].n_threads})"
        if n_waiting:
            said = f"{n_waiting} of {len(found)} experiments wait in {self._folder}, at most {len(slots)} run at once "
            self._console.print(f"{said}on {where}", soft_wrap=True)
        return n_waiting

    @contextlib.contextmanager
    def show(self, stop: StopRequest) -> Iterator[None]:
        """Show a live table inside the block on a terminal; calls of the view redraw it."""
        self._stop = stop
        if not (self._console.is_interactive and self._console.file.isatty()) or self._console.quiet:
            yield
            return
        with Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop") as self._live:
            yield

    def __call__(self) -> None:
        try:
            self._tell()
        except OSError:
            if self._stop is None or self._stop.signal_number is None:
                raise
            self._console.quiet = True  # the terminal is gone; the trainings shall save nevertheless

    def _tell(self) -> None:
        if self._stop and self._stop.signal_number is not None and not self._has_told_stop:
            self._has_told_stop = True
            said = "waiting until the trainings that run have saved; the same signal once more ends them at once"
            self._console.print(said, style="yellow", soft_wrap=True)
        if self._live is None:
            self._print_changes()
        elif time.monotonic() - self._drawn_s >= REDRAW_S:
            found = self._client.get("/api/experiments", urgent=listing.N_ROWS)["experiments"]
            table = listing.build_table(found, width=self._console.width)
            states = self._client.get("/api/status")["states"]
            table.title, table.title_justify = listing.describe_states(states), "left"
            self._live.update(table, refresh=True)
            self._drawn_s = time.monotonic()

    def _print_changes(self) -> None:
        found = self._client.get("/api/events", after=self._seq)
        for event in found["events"]:
            self._seq = event["seq"]
            if event["state"] in TOLD:
                self._console.print(_describe_change(event, found["experiments"][event["experiment"]]), soft_wrap=True)


def _describe_change(event: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    again = f", attempt {event['attempt']}" if event["attempt"] > 1 else ""
    said = {
        "start": f"runs on {', '.join(entry['devices'])}{again}",
        "commit": f"succeeded: {listing.describe_metrics(entry['metrics'])}",
        "fail": f"failed: {entry['reason']}",
        "give_up": f"is held, it was lost too often: {entry['reason']}",
        "requeue": f"is queued again: {entry['reason']}",
        "back_off": f"is queued again: {entry['reason']}",
    }
    what = said.get(event["arrow"], f"is {event['state']}")
    return f"{event['experiment']} ({listing.describe_point(entry)}) {what}"
