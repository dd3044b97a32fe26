"""A training as its event log tells it: every step once, however often the run was stopped and went on."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.records.run_folder import read_lines

EVENTS_FILE = "events.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A logging interval, or several joined; its place is where it ends.

    Attributes:
        epoch: Epochs since the start, with a fraction; None where the data streams and an epoch has no known length.
        training_seconds: Since the start, evaluation and checkpoints left out.
        loss: Mean over its samples; None where it was no finite number.
        n_steps: Optimizer steps in it.
    """

    step: int
    epoch: float | None
    training_seconds: float
    loss: float | None
    lr: float
    samples_per_s: float
    n_steps: int
    n_samples: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Figures of one evaluation, or of the training set over an epoch."""

    step: int
    epoch: float
    training_seconds: float
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRun:
    """One training.

    Attributes:
        started: Its newest ``RunStarted``, as written.
        ended: Its newest ``RunEnded``; None for a run that is under way or was killed.
        n_attempts: Times it was started or resumed: a replan in the middle, after memory ran out, is none.
        notes: What was told on the way, each once.
    """

    folder: str
    name: str
    started: Mapping[str, Any]
    ended: Mapping[str, Any] | None
    n_attempts: int
    intervals: Sequence[Interval]
    epochs: Sequence[Reading]
    evaluations: Sequence[Reading]
    notes: Sequence[str]

    @property
    def training_seconds(self) -> float:
        return self.intervals[-1].training_seconds if self.intervals else 0.0

    @property
    def samples_per_s(self) -> float | None:
        seconds = sum(interval.seconds for interval in self.intervals)
        return sum(interval.n_samples for interval in self.intervals) / seconds if seconds else None

    @property
    def last_step(self) -> int:
        return self.intervals[-1].step if self.intervals else 0


def read_training(folder: str | Path) -> TrainingRun:
    """Read ``events.jsonl`` of a run folder.

    Raises:
        UsageError: there is none, or it holds no logging interval yet.
    """
    path = Path(folder) / EVENTS_FILE
    if not path.is_file():
        raise UsageError(f"{folder} holds no {EVENTS_FILE}; name the folder of a training")
    try:
        events = [json.loads(line) for line in read_lines(path)]
        return _assemble(str(folder), events)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is not the event log of a training: {error!r}") from None


def drop_repeated(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Without what came after the checkpoint that a later process went on from: it took those steps again."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        if event["event"] == "RunStarted":
            first = event.get("first_step", 0)
            kept = [old for old in kept if old.get("step", 0) <= first]
        kept.append(event)
    return kept


def join_intervals(intervals: Sequence[Interval], n_points: int) -> tuple[list[Interval], int]:
    """At most ``n_points`` intervals, neighbours joined → them, and how many make one."""
    size = max(1, -(-len(intervals) // n_points))
    parts = [intervals[start : start + size] for start in range(0, len(intervals), size)]
    return [part[0] if len(part) == 1 else _join(part) for part in parts], size


def _assemble(folder: str, events: Sequence[Mapping[str, Any]]) -> TrainingRun:
    started = [event for event in events if event["event"] == "RunStarted"]
    kept = drop_repeated(events)
    intervals = list(_read_intervals(kept, started[-1] if started else {}))
    if not started or not intervals:
        raise UsageError(f"{folder} holds no step yet; train first, or wait for run.log_every_n_steps of them")
    n_per_epoch = started[-1].get("steps_per_epoch")
    return TrainingRun(
        folder=folder,
        name=started[-1]["name"],
        started=started[-1],
        ended=events[-1] if events[-1]["event"] == "RunEnded" else None,
        n_attempts=_count_attempts(events),
        intervals=intervals,
        epochs=list(_read_epochs(kept, intervals)),
        evaluations=list(_read_evaluations(kept, n_per_epoch)),
        notes=tuple(dict.fromkeys(event["message"] for event in events if event["event"] == "Noted")),
    )


def _count_attempts(events: Sequence[Mapping[str, Any]]) -> int:
    """A ``RunStarted`` that a ``Replanned`` announced belongs to the process that was there."""
    told = [event["event"] for event in events if event["event"] in ("RunStarted", "Replanned")]
    return sum(now == "RunStarted" and before != "Replanned" for before, now in itertools.pairwise(["", *told]))


def _read_intervals(events: Sequence[Mapping[str, Any]], started: Mapping[str, Any]) -> Iterator[Interval]:
    n_per_epoch = started.get("steps_per_epoch")
    seconds = 0.0
    for event in events:
        if event["event"] == "StepsDone":
            seconds += event["seconds"]
            names = ("step", "loss", "lr", "samples_per_s", "n_steps", "n_samples", "seconds")
            yield Interval(
                **{name: event[name] for name in names},
                epoch=event["epoch"] + event["step_in_epoch"] / n_per_epoch if n_per_epoch else None,
                training_seconds=seconds,
            )


def _read_epochs(events: Sequence[Mapping[str, Any]], intervals: Sequence[Interval]) -> Iterator[Reading]:
    seconds_at = {interval.step: interval.training_seconds for interval in intervals}
    for event in events:
        if event["event"] == "EpochDone" and event["step"] in seconds_at:
            yield Reading(
                step=event["step"],
                epoch=event["epoch"] + 1,
                training_seconds=seconds_at[event["step"]],
                metrics=_select_finite({"loss": event["loss"], **event["metrics"]}),
            )


def _read_evaluations(events: Sequence[Mapping[str, Any]], n_per_epoch: int | None) -> Iterator[Reading]:
    for event in events:
        if event["event"] == "Evaluated":
            yield Reading(
                step=event["step"],
                epoch=event["step"] / n_per_epoch if n_per_epoch else event["epoch"] + 1,
                training_seconds=event["training_seconds"],
                metrics=_select_finite(event["metrics"]),
            )


def _select_finite(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """JSON has no spelling for NaN and infinity: they were written as null."""
    return {name: value for name, value in metrics.items() if value is not None}


def _join(part: Sequence[Interval]) -> Interval:
    n_samples, seconds = sum(i.n_samples for i in part), sum(i.seconds for i in part)
    told = [(i.loss, i.n_samples) for i in part if i.loss is not None]
    return dataclasses.replace(
        part[-1],
        loss=sum(loss * n for loss, n in told) / sum(n for _, n in told) if told else None,
        samples_per_s=n_samples / seconds if seconds else part[-1].samples_per_s,
        n_steps=sum(i.n_steps for i in part),
        n_samples=n_samples,
        seconds=seconds,
    )
