"""What a search shows while it runs: a line a trial, and under them a bar with what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fulltilt.report import describe_plan, format_duration, format_throughput
from fulltilt.tuner.progress import SearchEvent, SearchNoted, SearchStarted, TrialDone, TrialProgressed, TrialStarted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

KINDS = {"repeat": " (again)", "baseline": " (the settings as they were)"}
STATUS_STYLES = {"ok": "green", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}


class SearchView:
    """Takes the events of a search. Off a terminal it writes the same lines without the bar."""

    def __init__(self, console: Console):
        self._console = console
        self._progress: Progress | None = None
        self._bar: TaskID | None = None
        self._base: Mapping[str, Any] | None = None

    @contextlib.contextmanager
    def show(self) -> Iterator[SearchView]:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        if not self._console.is_terminal:
            yield self
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        with Progress(*columns, console=self._console, transient=True) as self._progress:
            self._bar = self._progress.add_task("starting", total=None, left="")
            yield self

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                found = f", {event.n_resumed} rows found there" if event.n_resumed else ""
                self._say(
                    f"{event.strategy} search on {event.device}: grid of {event.grid_size}; {event.folder}{found}"
                )
            case SearchNoted():
                self._say(event.message, style="yellow")
            case TrialStarted():
                self._update(f"{event.id} {describe_plan(event.plan)}: {event.why}", event.n_done, event.n_planned)
            case TrialProgressed():
                pass
            case TrialDone() if not event.is_resumed:
                self._say(self._describe(event), style=STATUS_STYLES[event.trial.status])
                left = f"about {format_duration(event.seconds_left)} left" if event.seconds_left is not None else ""
                self._update(None, event.n_done, event.n_planned, left)

    def _describe(self, event: TrialDone) -> str:
        trial = event.trial
        plan = describe_plan(trial.plan) + KINDS.get(trial.kind, "")
        if trial.status != "ok":
            return f"{trial.id:>4}  {trial.status.replace('_', ' ')}: {plan}\n      {trial.reason}"
        row = {"samples_per_s": trial.samples_per_s, "samples_per_s_ci95": trial.samples_per_s_ci95}
        memory = trial.device_memory_peak_gib
        size = f"{memory:.2f} GiB  " if memory is not None else ""
        return f"{trial.id:>4}  {format_throughput(row):>18} samples/s  {size}{plan}"

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def _update(self, text: str | None, n_done: int, n_planned: int, left: str | None = None) -> None:
        if self._progress is None or self._bar is None:
            return
        fields = {} if left is None else {"left": left}
        if text is not None:
            fields["description"] = text.replace("[", "\\[")
        self._progress.update(self._bar, completed=n_done, total=n_planned or None, **fields)  # type: ignore[arg-type]
