"""A grid that was run whole on a real machine, and a target that answers a search from it.

The file ``recordings/grid-NAME-DEVICE.json`` holds the space (axes, base and user plan, facts, memory limit), the
machine, and one row a process as a search journals it: every plan of the grid ``n_repeats`` times, the loader and the
device by themselves once for every point they can be asked for, the memory estimate where it could be made.
``benchmarks/_record_grid.py`` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from fulltilt.errors import DataError
from fulltilt.levers import Facts, load_catalogue
from fulltilt.records import WHOLE_RUNS, Machine, Plan, Trial, decode, encode
from fulltilt.tuner.picks.recommend import MEMORY_SAFETY_PCT
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.trials.rows import build_row

VERSION = 1
RECORDINGS = Path(__file__).parent / "recordings"
SHARED = ("threads", COUPLED)
"""Levers that the loader and the device both feel."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GridRecording:
    """The content of one file.

    Attributes:
        memory_gib: Of the device or the limit of the recording; None when it is not known.
        rows: In the order they ran; "skipped" beyond a batch that ran out of memory.
    """

    version: int
    name: str
    device: str
    command: str
    date: str
    workload: dict[str, Any]
    machine: Machine
    versions: dict[str, str]
    axes: dict[str, tuple[Any, ...]]
    base: Plan
    user_plan: Plan
    effective_batch_size: int | None
    facts: Facts
    memory_gib: float | None
    n_repeats: int
    seconds: float
    rows: tuple[Trial, ...]

    def to_text(self) -> str:
        """JSON with one row a line, so that a recording can be read and compared by eye."""
        head = {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "rows"}
        rows = ",\n".join(json.dumps(encode(row), separators=(",", ":"), allow_nan=False) for row in self.rows)
        return f'{json.dumps(head, indent=1, allow_nan=False)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            DataError: it is no recording of this version.
        """
        try:
            found = decode(cls, json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no recorded grid: {error}") from None
        if found.version != VERSION:
            raise DataError(f"{path} is of version {found.version}, this reads {VERSION}; record it again")
        return found

    def build_space(self) -> Space:
        limit_gib = None if self.memory_gib is None else self.memory_gib * MEMORY_SAFETY_PCT / 100
        return Space(
            axes=self.axes, base=self.base, user_plan=self.user_plan, facts=self.facts,
            effective_batch_size=self.effective_batch_size, memory_gib=limit_gib,
        )  # fmt: skip


def read_recordings(folder: Path = RECORDINGS) -> list[GridRecording]:
    return [GridRecording.read(path) for path in sorted(folder.glob("grid-*.json"))]


def find_device_part(plan: Plan) -> Plan:
    """The plan with what only the loader feels at its default: what a device or memory probe depends on."""
    return _reset(plan, (name for name, lever in load_catalogue().items() if lever.stage == "loader"))


def find_loader_part(plan: Plan) -> Plan:
    """The plan with what only the device feels at its default: what a loader probe depends on."""
    return _reset(plan, (name for name, lever in load_catalogue().items() if lever.stage != "loader"))


def find_line(plan: Plan) -> Plan:
    """What plans share that differ in their batch only."""
    return plan.replace(batch_size=0, accumulate=0)


def _reset(plan: Plan, names: Iterable[str]) -> Plan:
    catalogue = load_catalogue()
    return plan.replace(**{name: catalogue[name].default for name in names if name in plan and name not in SHARED})


class RecordedMachine:
    """Answers as the recorded machine did; a plan's runs come in an order drawn from the seed, then from the start.

    Raises:
        KeyError: a plan, or a part of one, that was not recorded.
    """

    def __init__(self, recording: GridRecording, seed: int = 0):
        self.recording, self.seed = recording, seed
        self._whole: dict[Plan, list[Trial]] = defaultdict(list)
        self._parts: dict[tuple[str, Plan], Trial] = {}
        for row in recording.rows:
            if row.kind in WHOLE_RUNS:
                self._whole[row.plan].append(row)
            else:
                self._parts[row.kind, _find_part(row.plan, row.kind)] = row
        self.restart_noise("")

    @property
    def memory_gib(self) -> float | None:
        return self.recording.memory_gib

    @property
    def recommendable_gib(self) -> float | None:
        return None if self.memory_gib is None else self.memory_gib * MEMORY_SAFETY_PCT / 100

    def restart_noise(self, name: str) -> None:
        rng = np.random.default_rng([self.seed, *name.encode()])
        self._order = {plan: rng.permutation(len(rows)) for plan, rows in self._whole.items()}
        self._n_asked: dict[Plan, int] = defaultdict(int)

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = "end_to_end") -> Trial:
        row = self._find_whole(plan) if kind in WHOLE_RUNS else self._find_part_row(plan, kind)
        if row is None or row.status == "skipped":
            reason = "not recorded, because a smaller batch of the same line ran out of memory"
            return build_row(plan, id=id, why=why, kind=kind, status="out_of_memory", reason=reason)
        return dataclasses.replace(
            row, id=id, why=why, kind=kind, plan=plan, batch_size_per_device=plan["batch_size"] // row.n_devices,
            effective_batch_size=plan.effective_batch_size,
        )  # fmt: skip

    def _find_whole(self, plan: Plan) -> Trial:
        if plan not in self._whole:
            raise KeyError(f"{self.recording.name} holds no run of {plan!r}")
        order = self._order[plan]
        number = self._n_asked[plan]
        self._n_asked[plan] += 1
        return self._whole[plan][order[number % len(order)]]

    def _find_part_row(self, plan: Plan, kind: str) -> Trial | None:
        """None for a device probe above one that ran out of memory: such are not run."""
        part = _find_part(plan, kind)
        if (kind, part) in self._parts:
            return self._parts[kind, part]
        is_above = any(
            row.status == "out_of_memory"
            and row.plan["batch_size"] < part["batch_size"]
            and find_line(row.plan) == find_line(part)
            for (of, _), row in self._parts.items()
            if of == kind
        )
        if not is_above:
            raise KeyError(f"{self.recording.name} holds no {kind} probe of {part!r}")
        return None

    def find_rates(self) -> Mapping[Plan, float]:
        """Samples/s of every plan of which all runs went well: the median over them."""
        return {
            plan: statistics.median(row.samples_per_s or 0.0 for row in rows)
            for plan, rows in self._whole.items()
            if all(row.status == "ok" for row in rows)
        }

    def true_memory_gib(self, plan: Plan) -> float:
        """The largest peak among the runs of the plan; 0 where none was read."""
        return max((row.device_memory_peak_gib or 0.0 for row in self._whole[plan]), default=0.0)


def _find_part(plan: Plan, kind: str) -> Plan:
    return find_loader_part(plan) if kind == "loader" else find_device_part(plan)
