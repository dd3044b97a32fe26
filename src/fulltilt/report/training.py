"""Read a training from its event log: every step once, however often the run was stopped and went on."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.records.run_folder import read_lines

EVENTS_FILE = "events.jsonl"

Event = Mapping[str, Any]  # as written


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A logging interval, or several joined; its place is where it ends.

    Attributes:
        epoch: Epochs since the start, with a fraction; None where the data streams and an epoch has no known length.
        training_seconds: Since the start, evaluation and checkpoints left out.
        loss: Mean over its samples; None where it was no finite number.
    """

    step: int
    epoch: float | None
    training_seconds: float
    loss: float | None
    lr: float
    samples_per_s: float
    n_samples: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The metrics of one evaluation, or of the training set over an epoch."""

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


def read_training(folder: str | Path) -> TrainingRun:
    """Read ``events.jsonl`` of a run folder.

    Raises:
        UsageError: there is none, or it holds no logging interval yet.
    """
    path = Path(folder) / EVENTS_FILE
    if not path.is_file():
        missing = f"{folder} holds no {EVENTS_FILE}" if Path(folder).is_dir() else f"there is no folder {folder}"
        if (page := Path(folder) / "report.html").is_file():  # of a search, or a comparison
            missing += f", and has its page already ({page})"
        raise UsageError(f"{missing}; name the folder of a training")
    return read_training_lines(str(folder), read_lines(path))


def read_training_lines(name: str, lines: Sequence[str]) -> TrainingRun:
    """Read the lines of an event log; raises as ``read_training`` does."""
    try:
        return _assemble(name, [json.loads(line) for line in lines])
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise UsageError(f"{name}/{EVENTS_FILE} is not the event log of a training; name the folder of one") from None


def read_end(folder: Path) -> tuple[int | None, str]:
    """Read how many epochs the newest training in a folder was to take, and how it ended.

    None, where that is not known; an empty word, where it was killed or still runs.
    """
    n_epochs, reason = None, ""
    for line in read_lines(folder / EVENTS_FILE):
        with contextlib.suppress(ValueError, AttributeError, KeyError):  # no event
            if '"RunStarted"' in line and (event := json.loads(line))["event"] == "RunStarted":
                n_epochs, reason = event["n_epochs"], ""
            elif '"RunEnded"' in line and (event := json.loads(line))["event"] == "RunEnded":
                reason = event["reason"]
    return n_epochs, reason


def drop_repeated(events: Sequence[Event]) -> list[Event]:
    """Drop what came after the checkpoint that a later process went on from: it took those steps again."""
    kept: list[Event] = []
    for event in events:
        if event["event"] == "RunStarted":
            first = event.get("first_step", 0)
            kept = [old for old in kept if old.get("step", 0) <= first]
        kept.append(event)
    return kept


def join_intervals(intervals: Sequence[Interval], n_points: int) -> tuple[list[Interval], int]:
    """Join neighbours into at most ``n_points`` intervals → them, and how many make one."""
    size = max(1, -(-len(intervals) // n_points))
    return [_join(intervals[start : start + size]) for start in range(0, len(intervals), size)], size


def _join(part: Sequence[Interval]) -> Interval:
    if len(part) == 1:
        return part[0]
    n_samples, seconds = sum(i.n_samples for i in part), sum(i.seconds for i in part)
    told = [(i.loss, i.n_samples) for i in part if i.loss is not None]
    return dataclasses.replace(
        part[-1],
        loss=sum(loss * n for loss, n in told) / sum(n for _, n in told) if told else None,
        samples_per_s=n_samples / seconds if seconds else part[-1].samples_per_s,
        n_samples=n_samples,
        seconds=seconds,
    )


def _assemble(folder: str, events: Sequence[Event]) -> TrainingRun:
    started = next((event for event in reversed(events) if event["event"] == "RunStarted"), None)
    n_per_epoch = (started or {}).get("steps_per_epoch")
    kept = drop_repeated(events)
    intervals = list(_read_intervals(kept, n_per_epoch))
    if started is None or not intervals:
        raise UsageError(f"{folder} holds no step yet; train first, or wait for run.log_every_n_steps of them")
    seconds_at = {interval.step: interval.training_seconds for interval in intervals}
    return TrainingRun(
        folder=folder,
        name=started["name"],
        started=started,
        ended=events[-1] if events[-1]["event"] == "RunEnded" else None,
        n_attempts=_count_attempts(events),
        intervals=intervals,
        epochs=[
            _build_reading(event, n_per_epoch, seconds_at[event["step"]], loss=event["loss"])
            for event in kept
            if event["event"] == "EpochDone" and event["step"] in seconds_at
        ],
        evaluations=[
            _build_reading(event, n_per_epoch, event["training_seconds"])
            for event in kept
            if event["event"] == "Evaluated"
        ],
        notes=tuple(dict.fromkeys(event["message"] for event in events if event["event"] == "Noted")),
    )


def _count_attempts(events: Sequence[Event]) -> int:
    """Count the starts; a ``RunStarted`` that a ``Replanned`` announced belongs to the process that was there."""
    told = [event["event"] for event in events if event["event"] in ("RunStarted", "Replanned")]
    return sum(now == "RunStarted" and before != "Replanned" for before, now in itertools.pairwise(["", *told]))


def _read_intervals(events: Sequence[Event], n_per_epoch: int | None) -> Iterator[Interval]:
    seconds = 0.0
    for event in events:
        if event["event"] == "StepsDone":
            seconds += event["seconds"]
            names = ("step", "loss", "lr", "samples_per_s", "n_samples", "seconds")
            yield Interval(
                **{name: event[name] for name in names},
                epoch=event["step"] / n_per_epoch if n_per_epoch else None,
                training_seconds=seconds,
            )


def _build_reading(event: Event, n_per_epoch: int | None, training_seconds: float, **more: float | None) -> Reading:
    """Leave out what is null: NaN and infinity were written so."""
    metrics = {name: value for name, value in {**more, **event["metrics"]}.items() if value is not None}
    epoch = event["step"] / n_per_epoch if n_per_epoch else event["epoch"]  # from 0 in logs of earlier versions
    return Reading(step=event["step"], epoch=epoch, training_seconds=training_seconds, metrics=metrics)
