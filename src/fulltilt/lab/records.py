"""Records of the lab: a point of a grid, an experiment, an attempt, an event."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point of a grid that is not stored yet.

    Attributes:
        values: The values of the grid's axes at this point, by dotted key.
        config: All values, resolved.
        digest: Digest of the settings that decide the result; it identifies the experiment within its file.
    """

    values: Mapping[str, Any]
    config: Mapping[str, Any]
    digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt at an experiment; its number is the fencing token."""

    experiment: str
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """One experiment of the queue, with its newest attempt.

    Attributes:
        overrides: The ``key=value`` arguments it was submitted with.
        attempt: Number of the newest attempt; 0: none yet.
        outcome: End of that attempt: succeeded, user_error, refused, lost, preempted, cancelled; None while it runs.
        metrics: Metrics of the accepted result.
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
    """One change of an experiment's state."""

    seq: int
    experiment: str
    attempt: int
    arrow: str
    state: str  # that it led to
    time_s: float  # Unix time
