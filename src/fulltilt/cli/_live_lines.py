"""What a search says while it runs, in lines: for a pipe, a log, a terminal that cannot be redrawn."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from fulltilt.records import PROBES, Trial, format_gib
from fulltilt.report import describe_plan, explain_mark, format_duration, format_throughput, mark_busy
from fulltilt.tuner.search.progress import SearchEvent, SearchNoted, SearchStarted, TrialCut, TrialDone

KINDS = {"repeat": " (side by side)", "baseline": " (the settings as they were)"}
PROBE_NAMES = {"device": "step alone", "loader": "loader alone", "memory": "of tensors, estimated"}
STATUS_STYLES = {"ok": "green", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}


class SearchLines:
    """Writes the events of a search to a console: a line or two for each trial that was run."""

    def __init__(self, console: Console):
        self._console = console

    def __call__(self, event: SearchEvent) -> None:
        if isinstance(event, TrialDone):
            if not event.is_resumed:
                self._console.print(_build_line(event), soft_wrap=True)
        elif said := describe_event(event):
            self._console.print(said, style="" if isinstance(event, SearchStarted) else "yellow", markup=False)


class RowCount:
    """Counts the rows of a search that lie in its folder, from its events."""

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
        """Return what an interruption leaves, in words."""
        if self._n_rows is None:
            return "the search had not begun; the same command begins it, or goes on with the rows of an earlier run"
        if not self._n_rows:
            return "no trial had ended yet, nothing was measured"
        rows = "1 row is" if self._n_rows == 1 else f"{self._n_rows} rows are"
        return f"{rows} kept in {self._folder}; the same command goes on"


def _build_line(event: TrialDone) -> Text:
    """Build a trial's figures, with dim words for why it was run and for what is left."""
    trial = event.trial
    is_dim = trial.kind in PROBES and trial.status == "ok"
    line = Text(_describe_trial(trial), style="dim" if is_dim else STATUS_STYLES[trial.status])
    said = [part for part in (trial.why, explain_mark(read_row(trial)), describe_left(event)) if part]
    return Text.assemble(line, (f"  · {' · '.join(said)}", "dim"))


def describe_event(event: SearchEvent) -> str | None:
    """Return what is said of a search beside its trials; None of an event that is passed over."""
    match event:
        case SearchStarted():
            found = f", {event.n_resumed} rows found there" if event.n_resumed else ""
            return f"{event.strategy} search on {event.device}: grid of {event.grid_size}; {event.folder}{found}"
        case SearchNoted():
            return event.message
        case TrialCut():
            return f"{event.id} was ended with the budget after {event.seconds:.1f} s: it is no row"
    return None


def _describe_trial(trial: Trial) -> str:
    """Return rate, memory and plan of a whole run; of a probe also which part of the step it measured."""
    is_probe, plan = trial.kind in PROBES, describe_plan(trial.plan) + KINDS.get(trial.kind, "")
    name = f"{trial.id:>4}  " + (f"{trial.kind} probe" if is_probe else "")
    if trial.status != "ok":
        return f"{name}{', ' if is_probe else ''}{trial.status.replace('_', ' ')}: {plan}\n      {trial.reason}"
    memory_gib = read_memory_gib(trial)
    memory = "" if memory_gib is None else format_gib(memory_gib)
    if not is_probe:
        return f"{name}{describe_rate(trial):>18} samples/s  {memory and memory + '  '}{plan}"
    row = read_row(trial) | {"samples_per_s_ci95": None}
    rate = "" if trial.samples_per_s is None else f"{mark_busy(format_throughput(row), row)} samples/s"
    return f"{name}: {', '.join(filter(None, (rate, memory))) or 'no figure'} {PROBE_NAMES[trial.kind]}, {plan}"


def describe_rate(trial: Trial) -> str:
    """Return the throughput with its interval, and the mark of a busy machine."""
    row = read_row(trial)
    return mark_busy(format_throughput(row), row)


def read_row(trial: Trial) -> dict[str, Any]:
    """Return what the words about a throughput are made from, as the JSON has it."""
    names = ("status", "samples_per_s", "samples_per_s_ci95", "cpu_pressure_pct")
    return {name: getattr(trial, name) for name in names}


def read_memory_gib(trial: Trial) -> float | None:
    """Return what a memory probe estimates; of everything else, what the device held at its peak."""
    return trial.memory_allocated_peak_gib if trial.kind == "memory" else trial.device_memory_peak_gib


def describe_left(event: TrialDone) -> str:
    """Return ``3 of at most 12 trials, at most about 1 min left``; without the time before there is a pace."""
    if event.n_done >= event.n_planned:  # the last one, or a noisy machine's search that looks on
        return f"{event.n_done} trials"
    left = f", at most about {format_duration(event.seconds_left)} left" if event.seconds_left is not None else ""
    return f"{event.n_done} of at most {event.n_planned} trials{left}"
