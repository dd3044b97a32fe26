"""Words for the events and rows of a running search, for its lines and for its table."""

from __future__ import annotations

from typing import Any

from fulltilt.records import Trial, format_gib
from fulltilt.report import describe_plan, format_duration, format_throughput, mark_busy
from fulltilt.tuner.search.progress import SearchStarted, TrialCut, TrialDone

KINDS = {"repeat": " (side by side)", "baseline": " (the settings as they were)"}
PROBE_NAMES = {"device": "step alone", "loader": "loader alone", "memory": "of tensors, estimated"}
STATUS_STYLES = {"ok": "green", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}


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
