"""``Observation``: the report of the observer inside a script, as one record."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulltilt.attach.inside.blocks import N_WARM_UP, REMOVED
from fulltilt.attach.inside.spans import KINDS
from fulltilt.errors import name_file
from fulltilt.records.run_folder import read_lines

EVERY_STEP_SHARE = 0.9  # a share that counts as every step
COLUMNS = ("wall", *KINDS, "flags", "round", "block", "arm", "is_timed")

Row = NDArray[np.int64]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One line of user code: what it calls, how often, and for how long, in plain steps."""

    kind: str  # one of KINDS
    file: str
    line: int
    does: str  # "item", "json.dump", …
    where: str | None  # the device of a tensor, the path of a file
    n_calls: int
    n_steps: int  # steps with at least one call
    ns: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LineTime:
    """One line of user code that loads samples, and the time traced in it."""

    file: str
    line: int
    function: str
    ns: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Where the loading of a few batches spent its time; ``at_ns`` is when they were traced."""

    at_ns: int
    is_worker: bool
    total_ns: int
    plain_ns: tuple[int, ...]  # of whole batches, untraced
    lines: tuple[LineTime, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What was observed of one training process.

    Attributes:
        rows: Shape (steps, columns): nanoseconds by kind of work, and the step's place in a comparison; see COLUMNS.
        target: The file whose writes were held back in some blocks, to measure their cost.
        refused: Files that every step writes but that cannot be held back: path → reason.
        span_ns: Cost of observing one call.
        failure: Why the observer switched itself off.
        n_steps: Number of steps; 1 where a training began and was killed before it said how many.
        n_processes: Number of processes that took steps; this is the one with the most.
    """

    rows: Row
    n_steps: int = 0
    device: str = "cpu"
    torch: str = ""
    sites: tuple[Site, ...] = ()
    samples: Samples | None = None
    target: str | None = None
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    span_ns: float = 0.0
    n_spans: int = 0
    own_ns: int = 0
    failure: str | None = None
    n_processes: int = 0

    def get(self, column: str) -> Row:
        return self.rows[:, COLUMNS.index(column)]

    @property
    def plain(self) -> "Observation":
        """Rows of plain steps: warm, inside an epoch, undisturbed, with nothing held back."""
        is_settling = (self.get("block") > 0) & (self.get("is_timed") == 0)
        keep = (self.get("flags") == 0) & (self.get("arm") != REMOVED) & ~is_settling
        keep[:N_WARM_UP] = False
        return dataclasses.replace(self, rows=self.rows[keep])

    @property
    def n_edges(self) -> int:
        """Number of warm steps that hold the end of an epoch, or of a training."""
        return int((self.get("flags")[N_WARM_UP:] & 1).sum())


def read_observation(folder: Path) -> Observation:
    """Read the reports of a command's processes and return that of the one with the most steps."""
    seen = [_read_process(path) for path in sorted(folder.glob("seen-*.jsonl"))]
    training = [found for found, _ in seen if found.n_steps]
    if not training:
        return Observation(rows=np.zeros((0, len(COLUMNS)), dtype=np.int64))
    chosen = max(training, key=lambda found: len(found.rows))
    samples = max((found for _, found in seen if found), key=lambda found: found.at_ns, default=None)
    return dataclasses.replace(chosen, samples=samples, n_processes=len(training))


def _read_process(path: Path) -> tuple[Observation, Samples | None]:
    lines = [json.loads(line) for line in read_lines(path)]
    rows = [row for line in lines if line["kind"] == "steps" for row in line["rows"]]
    start: dict[str, Any] = _find_last(lines, "start")
    summary = _find_last(lines, "summary")
    failure = _find_last(lines, "failed").get("error")
    has_begun = bool(start or failure)  # a run that is killed early, or a failure, leaves no summary
    found = Observation(
        rows=np.asarray(rows, dtype=np.int64).reshape(-1, len(COLUMNS)),
        device=start.get("device", "cpu"),
        torch=start.get("torch", ""),
        span_ns=start.get("span_ns", 0.0),
        n_steps=summary.get("n_steps", int(has_begun)),
        n_spans=summary.get("n_spans", 0),
        own_ns=summary.get("own_ns", 0),
        sites=tuple(Site(**{**site, "file": name_file(site["file"])}) for site in summary.get("sites", ())),
        target=summary.get("target"),
        refused=summary.get("refused", {}),
        failure=failure,
    )
    return found, _read_samples(_find_last(lines, "samples"))


def _read_samples(line: dict[str, Any]) -> Samples | None:
    if not line:
        return None
    return Samples(
        at_ns=line["at_ns"],
        is_worker=line["is_worker"],
        total_ns=line["total_ns"],
        plain_ns=tuple(line["plain_ns"]),
        lines=tuple(
            LineTime(file=name_file(file), line=number, function=name, ns=ns)
            for file, number, name, ns, _ in line["lines"]
        ),
    )


def _find_last(lines: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    return next((line for line in reversed(lines) if line["kind"] == kind), {})
