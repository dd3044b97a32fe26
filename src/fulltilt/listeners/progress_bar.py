"""``ProgressBar``: where a run is and what is left of it."""

import math
import re
import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from fulltilt.records import CheckpointSaved, EpochDone, Evaluated, Event, Noted, RunEnded, RunStarted, StepsDone

REDRAW_S = 0.5  # drawing takes 0.4 ms


class ProgressBar:
    """Shows a bar on a terminal and one line an epoch; elsewhere only the lines, and of a quiet console warnings alone.

    That training has finished, or why it failed, is for its caller to tell, who has the result or the error.

    Redrawn when an event comes in, at most twice a second, never by a thread: a forked data worker must not inherit a
    held lock.

    Args:
        console: Where it goes; standard error when None, so that standard output stays free for results.
        clock: Seconds from any start.
    """

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic):
        self._console = console or Console(stderr=True)
        self._bar: Progress | None = None
        self._started: RunStarted | None = None
        self._n_total: int | None = None
        self._saved_step: int | None = None
        self._seconds = 0.0  # of training in this process
        self._epoch_line: str | None = None
        self._clock = clock
        self._drawn_s = -math.inf
        self._told: set[str] = set()  # lines of a start: a run that starts anew says what has changed

    def __call__(self, event: Event) -> None:
        # An epoch's line waits for the evaluation that may follow it.
        parts = [self._epoch_line] if self._epoch_line else []
        if isinstance(event, Evaluated):
            parts += [f"{event.split} {name} {value:.4g}" for name, value in list_headlines(event.metrics)]
        if parts:
            self._print("  ".join(parts))
        self._epoch_line = self._format_epoch(event) if isinstance(event, EpochDone) else None
        if isinstance(event, RunStarted):
            self._start(event)
        elif isinstance(event, StepsDone):
            self._seconds += event.seconds
            self._advance(event)
        elif isinstance(event, Noted):
            said = f"{event.level}: {event.message}"
            if self._console.quiet and event.level == "warning":  # nobody else tells it
                print(" ".join(said.splitlines()), file=sys.stderr, flush=True)
            self._print(said)
        elif isinstance(event, RunEnded):
            self._end(event)
        elif isinstance(event, CheckpointSaved):
            self._saved_step = event.step
            if self._bar is not None:
                self._bar.refresh()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start(self, event: RunStarted) -> None:
        self._stop_bar()  # of a run that goes on in another form, see Replanned
        self._started, self._seconds = event, 0.0
        self._n_total = event.steps_per_epoch * event.n_epochs if event.steps_per_epoch else None
        head = f"{event.name} on {event.device}, {event.n_parameters:,} parameters, files in {event.out_dir}"
        for line in [head, *(f"  {line}" for line in event.report)]:
            if (said := re.sub(r"[\d.]+ \wiB", "", line)) not in self._told:  # free memory is another at every start
                self._told.add(said)
                self._print(line)
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
            bar = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            bar.start()
            bar.add_task("", total=self._n_total, completed=event.first_step, figures="")
            self._bar = bar

    def _advance(self, event: StepsDone) -> None:
        if self._bar is None or self._started is None:
            return
        now_s = self._clock()
        if now_s - self._drawn_s < REDRAW_S:
            return
        self._drawn_s = now_s
        of_steps = f"/{self._n_total:,}" if self._n_total else ""
        n_done, left = event.step - self._started.first_step, ""
        if self._n_total and n_done > 0:
            left_s = max(0, self._n_total - event.step) * self._seconds / n_done
            left = f" · {format_seconds(left_s)} left"
        self._bar.update(
            self._bar.task_ids[0],
            completed=event.step,
            description=f"epoch {event.epoch}/{self._started.n_epochs} · step {event.step:,}{of_steps}",
            figures=f"loss {event.loss:.4g} · {event.samples_per_s:,.0f} samples/s{left}",
        )
        self._bar.refresh()

    def _format_epoch(self, event: EpochDone) -> str:
        n_epochs = self._started.n_epochs if self._started else "?"
        parts = [f"epoch {event.epoch}/{n_epochs}", f"loss {event.loss:.4g}"]
        parts += [f"{name} {value:.4g}" for name, value in list_headlines(event.metrics)]
        return "  ".join([*parts, f"{event.samples_per_s:,.0f} samples/s", format_seconds(event.seconds)])

    def _end(self, event: RunEnded) -> None:
        self._stop_bar()
        if event.reason == "finished":
            return
        first = self._started.first_step if self._started else 0
        here = f", {event.step - first:,} of them since the checkpoint it went on from" if first else ""
        steps = f"{event.step:,} step{'s' if event.step != 1 else ''}"
        how = event.reason.partition(": ")[0]
        kept = how == "failed" and self._saved_step is not None
        saved = f"; the checkpoint of step {self._saved_step:,} is kept" if kept else ""
        self._print(f"{how} after {steps}{here}, {format_seconds(event.seconds)}{saved}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def list_headlines(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """List what a line has room for: a name with a slash (``error_pct/rare``) is part of a breakdown, for the files."""
    return [(name, value) for name, value in metrics.items() if "/" not in name]


def format_seconds(seconds: float) -> str:
    """Write seconds as ``4.2 s``, ``3:07`` or ``2:15:00``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
