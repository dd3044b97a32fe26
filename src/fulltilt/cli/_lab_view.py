"""Show how experiments get on while ``fulltilt lab submit`` runs: a table redrawn in place, or a line a change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.live import Live

from fulltilt.lab.listing import build_table, describe_counts, describe_metrics, describe_point
from fulltilt.lab.records import Event, Experiment
from fulltilt.lab.stopping import StopRequest
from fulltilt.lab.store import Store

if TYPE_CHECKING:
    from rich.console import Console

REDRAW_S = 1.0
TOLD = ("running", "succeeded", "failed", "cancelled", "queued")  # states that are worth a line


class QueueView:
    """Tells how the experiments ``ids`` get on; called at every turn of the loop.

    The table is drawn by these calls and by no thread: a process that forks should have one.
    """

    def __init__(self, console: Console, lab: Path, store: Store, ids: set[str], stop: StopRequest):
        self._console, self._lab, self._store, self._ids, self._stop = console, lab, store, ids, stop
        self._seq = max((event.seq for event in store.read_events()), default=0)
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._has_told_stop = False

    @contextlib.contextmanager
    def show(self) -> Iterator[QueueView]:
        """Redraw a table until the block ends, where the console is a terminal."""
        if not (self._console.is_interactive and self._console.file.isatty()) or self._console.quiet:
            yield self
            return
        with Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop") as self._live:
            yield self

    def __call__(self) -> None:
        try:
            self._tell()
        except OSError:
            if self._stop.number is None:
                raise
            self._console.quiet = True  # the terminal is gone; the trainings shall save nevertheless

    def _tell(self) -> None:
        if self._stop.number is not None and not self._has_told_stop:
            self._has_told_stop = True
            said = "waiting until the trainings that run have saved; the same signal once more ends them at once"
            self._console.print(said, style="yellow", soft_wrap=True)
        if self._live is None:
            self._print_changes()
        elif time.monotonic() - self._drawn_s >= REDRAW_S:
            shown = [found for found in self._store.read_experiments() if found.id in self._ids]
            table = build_table(self._lab, shown)
            table.title, table.title_justify = describe_counts(shown), "left"
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
        "commit": f"succeeded: {describe_metrics(experiment.metrics)}",
        "fail": f"failed: {experiment.reason}",
        "requeue": f"is queued again: {experiment.reason}",
    }
    return f"{event.experiment} ({describe_point(experiment)}) {said.get(event.arrow, f'is {event.state}')}"
