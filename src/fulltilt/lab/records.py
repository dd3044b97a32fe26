"""What the rooms of the lab say to each other: a point of a grid, an experiment, one try at it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of a grid before it is a row.

    Attributes:
        values: What the axes of the grid say here, by dotted key.
        config: All values, resolved.
        digest: Of what decides the training: the same digest from the same file is the same experiment.
    """

    values: Mapping[str, Any]
    config: Mapping[str, Any]
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One try at an experiment, told apart from earlier ones by its number: the fencing token."""

    experiment: str
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """A row of the queue with its newest attempt.

    Attributes:
        overrides: The ``key=value`` words that it was submitted with.
        attempt: 0 before the first.
        outcome: Of the newest attempt: succeeded, user_error, refused, lost, preempted, cancelled; None while it runs.
        metrics: Of the accepted result.
    """

    id: str
    sweep: str
    state: str
    attempt: int
    priority: int
    point: Mapping[str, Any]
    overrides: Sequence[str]
    node: str | None = None
    devices: Sequence[str] = ()
    n_threads: int | None = None
    pid: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    outcome: str | None = None
    reason: str | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def newest(self) -> Attempt:
        return Attempt(experiment=self.id, number=self.attempt)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An arrow that an experiment took."""

    seq: int
    experiment: str
    attempt: int
    arrow: str
    state: str  # that it led to
    time_s: float  # Unix time
