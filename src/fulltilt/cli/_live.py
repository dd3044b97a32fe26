"""What a search shows while it runs: a line a trial, and under them a bar with what is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fulltilt.records import Trial
from fulltilt.report import describe_plan, format_duration, format_gib, format_throughput
from fulltilt.tuner.progress import SearchEvent, SearchNoted, SearchStarted, TrialDone, TrialProgressed, TrialStarted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

KINDS = {"repeat": " (again)", "baseline": " (the settings as they were)"}
PROBE_NAMES = {"device": "step alone", "loader": "loader alone", "memory": "estimated"}
STATUS_STYLES = {"ok": "green", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}


def describe_trial(trial: Trial) -> str:
    """One whole run: throughput with its interval, memory, plan."""
    plan = describe_plan(trial.plan) + KINDS.get(trial.kind, "")
    if trial.status != "ok":
        return f"{trial.id:>4}  {trial.status.replace('_', ' ')}: {plan}\n      {trial.reason}"
    row = {"samples_per_s": trial.samples_per_s, "samples_per_s_ci95": trial.samples_per_s_ci95}
    memory = trial.device_memory_peak_gib
    size = f"{memory:.2f} GiB  " if memory is not None else ""
    return f"{trial.id:>4}  {format_throughput(row):>18} samples/s  {size}{plan}"


def describe_probe(trial: Trial) -> str:
    """A part of the step, in short: its rate or its estimated memory, and the plan it belongs to."""
    name = f"{trial.id:>4}  {trial.kind} probe"
    if trial.status != "ok":
        return f"{name}, {trial.status.replace('_', ' ')}: {describe_plan(trial.plan)}\n      {trial.reason}"
    memory = trial.memory_allocated_peak_gib if trial.kind == "memory" else trial.device_memory_peak_gib
    rate = {"samples_per_s": trial.samples_per_s}
    figures = [
        *([f"{format_throughput(rate)} samples/s"] if trial.samples_per_s is not None else []),
        *([format_gib(memory)] if memory is not None else []),
    ]
    return f"{name}: {', '.join(figures) or 'no figure'} {PROBE_NAMES[trial.kind]}, {describe_plan(trial.plan)}"


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
                part = f"{event.kind} probe, " if event.kind in PROBE_NAMES else ""
                text = f"{event.id} {part}{describe_plan(event.plan)}: {event.why}"
                self._update(text, event.n_done, event.n_planned)
            case TrialProgressed():
                pass
            case TrialDone() if not event.is_resumed:
                left = f"about {format_duration(event.seconds_left)} left" if event.seconds_left is not None else ""
                self._say_trial(event.trial, f"{event.n_done} of about {event.n_planned}, {left}" if left else "")
                self._update(None, event.n_done, event.n_planned, left)

    def _say_trial(self, trial: Trial, left: str) -> None:
        """A line for the figures, dim words for why it was run; what is left only where no bar shows it."""
        from rich.text import Text

        is_probe = trial.kind in PROBE_NAMES
        text = Text(describe_probe(trial) if is_probe else describe_trial(trial))
        text.stylize("dim" if is_probe and trial.status == "ok" else STATUS_STYLES[trial.status])
        said = [*([trial.why] if trial.why else []), *([left] if left and self._progress is None else [])]
        if said:
            text.append(f"  · {' · '.join(said)}", style="dim")
        self._console.print(text, soft_wrap=not self._console.is_terminal)

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False)

    def _update(self, text: str | None, n_done: int, n_planned: int, left: str | None = None) -> None:
        if self._progress is None or self._bar is None:
            return
        fields = {} if left is None else {"left": left}
        if text is not None:
            fields["description"] = text.replace("[", "\\[")
        self._progress.update(self._bar, completed=n_done, total=n_planned or None, **fields)  # type: ignore[arg-type]
