"""What a search says while it runs, in lines: for a pipe, a log, a terminal that cannot be redrawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fulltilt.records import PROBES, Trial, format_gib
from fulltilt.report import describe_plan, explain_mark, format_duration, format_throughput, mark_busy
from fulltilt.tuner.search.progress import OnEvent, SearchEvent, SearchNoted, SearchStarted, TrialCut, TrialDone

if TYPE_CHECKING:
    from rich.console import Console

KINDS = {"repeat": " (side by side)", "baseline": " (the settings as they were)"}
PROBE_NAMES = {"device": "step alone", "loader": "loader alone", "memory": "of tensors, estimated"}
STATUS_STYLES = {"ok": "green", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}


@contextlib.contextmanager
def show_search(console: Console) -> Iterator[OnEvent]:
    """Show the events of a search: as a table redrawn in place where the console can be redrawn, else as lines.

    A pipe that was told to take colours (``FORCE_COLOR``) still gets lines.
    """
    if not (console.is_interactive and console.file.isatty()):
        yield SearchLines(console)
        return
    from fulltilt.cli._live_table import LiveTable

    with LiveTable(console).show() as table:
        yield table


class SearchLines:
    """Takes the events of a search and writes a line or two for each trial that was run."""

    def __init__(self, console: Console):
        self._console = console

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                self._console.print(describe_start(event), markup=False)
            case SearchNoted():
                self._console.print(event.message, style="yellow", markup=False)
            case TrialCut():
                self._console.print(describe_cut(event), style="yellow", markup=False)
            case TrialDone() if not event.is_resumed:
                self._print_trial(event)

    def _print_trial(self, event: TrialDone) -> None:
        """A line for the figures, dim words for why it was run and for what is left."""
        from rich.text import Text

        trial, left = event.trial, describe_left(event)
        is_probe = trial.kind in PROBES
        text = Text(describe_probe(trial) if is_probe else describe_trial(trial))
        text.stylize("dim" if is_probe and trial.status == "ok" else STATUS_STYLES[trial.status])
        said = [part for part in (trial.why, explain_mark(read_row(trial)), left) if part]
        if said:
            text.append(f"  · {' · '.join(said)}", style="dim")
        self._console.print(text, soft_wrap=True)


class RowCount:
    """Takes the events of a search and counts the rows that lie in its folder."""

    def __init__(self):
        self._n_rows: int | None = None  # until the folder was read
        self._folder = ""

    def __call__(self, event: SearchEvent) -> None:
        match event:
            case SearchStarted():
                self._n_rows, self._folder = event.n_resumed, event.folder
            case TrialDone() if not event.is_resumed:
                self._n_rows = (self._n_rows or 0) + 1

    def describe_kept(self) -> str:
        """What an interruption leaves, in words."""
        if self._n_rows is None:
            return "the search had not begun; the same command begins it, or goes on with the rows of an earlier run"
        if not self._n_rows:
            return "no trial had ended yet, nothing was measured"
        rows = "1 row is" if self._n_rows == 1 else f"{self._n_rows} rows are"
        return f"{rows} kept in {self._folder}; the same command goes on"


def describe_start(event: SearchStarted) -> str:
    found = f", {event.n_resumed} rows found there" if event.n_resumed else ""
    return f"{event.strategy} search on {event.device}: grid of {event.grid_size}; {event.folder}{found}"


def describe_cut(event: TrialCut) -> str:
    return f"{event.id} was ended with the budget after {event.seconds:.1f} s: it is no row"


def describe_trial(trial: Trial) -> str:
    """One whole run: throughput with its interval, memory, plan."""
    plan = describe_plan(trial.plan) + KINDS.get(trial.kind, "")
    if trial.status != "ok":
        return f"{trial.id:>4}  {trial.status.replace('_', ' ')}: {plan}\n      {trial.reason}"
    memory = trial.device_memory_peak_gib
    size = f"{format_gib(memory)}  " if memory is not None else ""
    return f"{trial.id:>4}  {describe_rate(trial):>18} samples/s  {size}{plan}"


def describe_probe(trial: Trial) -> str:
    """A part of the step, in short: its rate or its estimated memory, and the plan it belongs to."""
    name = f"{trial.id:>4}  {trial.kind} probe"
    if trial.status != "ok":
        return f"{name}, {trial.status.replace('_', ' ')}: {describe_plan(trial.plan)}\n      {trial.reason}"
    memory = read_memory_gib(trial)
    row = read_row(trial) | {"samples_per_s_ci95": None}
    figures = [
        *([f"{mark_busy(format_throughput(row), row)} samples/s"] if trial.samples_per_s is not None else []),
        *([format_gib(memory)] if memory is not None else []),
    ]
    return f"{name}: {', '.join(figures) or 'no figure'} {PROBE_NAMES[trial.kind]}, {describe_plan(trial.plan)}"


def describe_rate(trial: Trial) -> str:
    """Throughput with its interval, and the mark of a busy machine."""
    row = read_row(trial)
    return mark_busy(format_throughput(row), row)


def read_row(trial: Trial) -> dict[str, Any]:
    """What the words about a throughput are made from, as the JSON has it."""
    names = ("status", "samples_per_s", "samples_per_s_ci95", "cpu_pressure_pct")
    return {name: getattr(trial, name) for name in names}


def read_memory_gib(trial: Trial) -> float | None:
    """Of a memory probe what it estimates; of everything else what the device held at its peak."""
    return trial.memory_allocated_peak_gib if trial.kind == "memory" else trial.device_memory_peak_gib


def describe_left(event: TrialDone) -> str:
    """``3 of at most 12 trials, at most about 1 min left``; without the time before there is a pace."""
    if event.n_done >= event.n_planned:  # the last one, or a noisy machine's search that looks on
        return f"{event.n_done} trials"
    left = f", at most about {format_duration(event.seconds_left)} left" if event.seconds_left is not None else ""
    return f"{event.n_done} of at most {event.n_planned} trials{left}"
