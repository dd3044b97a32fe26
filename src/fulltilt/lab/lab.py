"""Hold the parts of one lab that its server works with."""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

from fulltilt.lab.beneath import open_beneath
from fulltilt.lab.depot import Depot
from fulltilt.lab.metrics import Metrics
from fulltilt.lab.records import Attempt
from fulltilt.lab.scheduling.leases import STALE_S, Leases, Term
from fulltilt.lab.store import Store

LOCAL, RUNNER_LOGS = "local", "runners"  # in the folder: what trainings of this machine write, what runners say


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """What a machine of a cluster said last.

    Attributes:
        at_s: When, by ``time.monotonic``.
        lines: What its sensors read, for people; ``sample`` has it in numbers.
        busy: Its devices that others use, or that do not answer, with what shows it.
        is_leaving: It takes nothing any more.
    """

    at_s: float
    lines: Sequence[str] = ()
    sample: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    busy: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_leaving: bool = False

    def read_age_s(self) -> float:
        return time.monotonic() - self.at_s

    def is_fresh(self) -> bool:
        return self.read_age_s() < STALE_S


@dataclasses.dataclass(kw_only=True)
class Lab:
    """One lab: its folder, its records, its files, and who was heard of.

    Attributes:
        wishes: What somebody wants of live attempts, for the answers to their renewals; the store has them too.
        woken: Set when something changed that the coordinator should look at.
        filing: Held from the look whether a file is in the depot until it is noted, or removed.
        joining: Held from the look whether a machine of a name is here until one has it.
        machines: What the machines of a cluster said last, by name.
    """

    folder: Path
    store: Store
    depot: Depot
    leases: Leases
    term: Term
    wishes: dict[Attempt, str] = dataclasses.field(default_factory=dict)
    woken: threading.Event = dataclasses.field(default_factory=threading.Event)
    filing: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    joining: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    machines: dict[str, Heard] = dataclasses.field(default_factory=dict)


def find_out_dir(lab: Path, experiment: str) -> Path:
    """Return the folder of an experiment's logs and results."""
    return lab / experiment


def find_stream(lab: Path, attempt: Attempt, name: str) -> Path:
    """Return the file of what an attempt's runner appends: ``log-2.txt``, ``events-2.jsonl``."""
    stem, _, suffix = name.partition(".")
    return find_out_dir(lab, attempt.experiment) / f"{stem}-{attempt.number}.{suffix}"


def open_stream(lab: Path, attempt: Attempt, name: str, mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Open that file, without a buffer. Raises FileNotFoundError where it is not there, or a link."""
    return open_beneath(lab, *find_stream(lab, attempt, name).relative_to(lab).parts, mode=mode)
