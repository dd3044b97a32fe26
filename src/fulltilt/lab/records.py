"""Records of the lab: point, experiment, attempt, event; code, file, node, token."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def is_plain_name(name: str) -> bool:
    """Return whether a file below a folder can be named so: no path, and nothing that steers a terminal."""
    return name.isprintable() and "/" not in name and bool(name.strip(".")) and len(name.encode()) <= 200


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
        owner: Who submitted it.
        n_devices: Devices that it takes, all on one node.
        wish: What somebody wants of its attempt: cancel, pause.
        delay_s: How long it waits in backoff.
        n_lost: Ends in a row that were not its own fault.
        node: Where its attempt is; None while it waits. ``last_node`` is where it was last.
        engine: The executor of the newest attempt; ``ref`` is the name that this gave it.
        fence: Digest of the token that its runner holds.
        outcome: End of that attempt, as ``End`` has it, or cancelled, paused; None while it runs.
        metrics: Metrics of the accepted result.
    """

    id: str
    sweep: str
    state: str
    attempt: int
    priority: int
    point: Mapping[str, Any]
    overrides: Sequence[str]
    owner: str = ""
    n_devices: int = 1
    wish: str | None = None
    delay_s: float | None = None
    n_lost: int = 0
    last_node: str | None = None
    node: str | None = None
    devices: Sequence[str] = ()
    n_threads: int | None = None
    pid: int | None = None
    engine: str | None = None
    ref: str | None = None
    fence: str | None = None
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The code that an experiment was submitted with.

    Attributes:
        digest: Of the archive in the depot.
        root: The folder it was taken from, on the machine it was submitted from.
        entry: The configuration file in it.
    """

    digest: str
    root: str
    entry: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What an attempt has to do: the file it was submitted from, all values, its code."""

    source: Path
    config: Mapping[str, Any]
    code: Code | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Artefact:
    """A file of an attempt that lies in the depot under its digest."""

    name: str
    digest: str
    n_bytes: int
    attempt: int = 0
    time_s: float = 0.0  # Unix time at which it was stored


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine that runs attempts.

    Attributes:
        boot: Changes when the machine starts again.
        versions: Of what has to be the same everywhere: fulltilt, torch, python, ray.
        devices: Their names, those that it offers only.
        n_bad: Ends in a row that were not the experiments' fault, of different experiments.
        last_bad: The experiment of the last one.
    """

    name: str
    boot: str
    versions: Mapping[str, str]
    devices: Sequence[str]
    seen_s: float = 0.0  # Unix time
    n_bad: int = 0
    last_bad: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """What a token allows, and whom it was made for."""

    role: str  # read, submit, worker, join
    label: str
