"""A grid that was run whole on a real machine, and a target that answers a search from it.

The file ``recordings/grid-NAME-DEVICE.json`` holds the space (axes, base and user plan, facts, memory limit), the
machine, and one row a process as a search journals it: every plan of the grid ``n_repeats`` times as a whole run, the
loader and the device by themselves once for every point they can be asked for, the memory estimate where it could be
made, and the groups in which every plan that fits took turns with the user's own. These are the truth; recordings of
before have none, and theirs is the median of the whole runs.
``benchmarks/_record_grid.py`` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.levers import Facts, load_catalogue
from fulltilt.records import IN_TURNS, PROBES, WHOLE_RUN, Machine, Plan, Trial, encode, loads
from fulltilt.stats import Turns
from fulltilt.tuner.picks.finalists import MEMORY_SAFETY_PCT
from fulltilt.tuner.question.space import COUPLED, Space
from fulltilt.tuner.trials.rows import build_row, build_turns_row

VERSION = 1
RECORDINGS = Path(__file__).parent / "recordings"
SHARED = ("threads", COUPLED)
"""Levers that the loader and the device both feel."""
GROUP_ROW_S = 1.2  # that a process which takes turns needs in all


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GridRecording:
    """The content of one file."""

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
    memory_gib: float | None  # of the device or the limit of the recording; None when it is not known
    n_repeats: int
    seconds: float
    rows: tuple[Trial, ...]  # in the order they ran; "skipped" beyond a batch that ran out of memory

    def to_text(self) -> str:
        """Write JSON with one row a line, so that a recording can be read and compared by eye."""
        head = {f.name: encode(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "rows"}
        rows = ",\n".join(json.dumps(encode(row), separators=(",", ":"), allow_nan=False) for row in self.rows)
        return f'{json.dumps(head, indent=1, allow_nan=False)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'

    def build_space(self) -> Space:
        limit_gib = None if self.memory_gib is None else self.memory_gib * MEMORY_SAFETY_PCT / 100
        return Space(
            axes=self.axes, base=self.base, user_plan=self.user_plan, facts=self.facts,
            effective_batch_size=self.effective_batch_size, memory_gib=limit_gib,
        )  # fmt: skip


def read_recordings(folder: Path = RECORDINGS) -> list[GridRecording]:
    return [loads(GridRecording, path.read_text("utf-8")) for path in sorted(folder.glob("grid-*.json"))]


def find_part(plan: Plan, kind: str) -> Plan:
    """Return what a probe of this kind depends on: the plan with what the other part alone feels at its default."""
    reset = {
        name: lever.default
        for name, lever in load_catalogue().items()
        if (lever.stage == "loader") != (kind == "loader") and name in plan and name not in SHARED
    }
    return plan.replace(**reset)


def find_line(plan: Plan) -> Plan:
    """Return what plans share that differ in their batch only."""
    return plan.replace(batch_size=0, accumulate=0)


class RecordedMachine:
    """Answers as the recorded machine did; a plan's runs come in an order drawn from the seed, then from the start.

    A plan off the recorded grid ends with an error, so that no search can recommend it: such are asked for where a
    change is taken back to a value of the user's that the grid does not hold.

    Raises:
        KeyError: a plan of the grid, or a part of one, that was not recorded.
    """

    def __init__(self, recording: GridRecording, seed: int = 0):
        self.recording, self.seed = recording, seed
        self.memory_gib = recording.memory_gib
        self.recommendable_gib = recording.build_space().memory_gib
        self._grid = set(recording.build_space().grid())
        self._whole: dict[Plan, list[Trial]] = defaultdict(list)
        self._parts: dict[tuple[str, Plan], Trial] = {}
        for row in recording.rows:
            if row.kind in PROBES:
                self._parts[row.kind, find_part(row.plan, row.kind)] = row
            elif row.kind != IN_TURNS:
                self._whole[row.plan].append(row)
        self._turns = _read_turns(recording)
        self.restart_noise("")

    def restart_noise(self, name: str) -> None:
        """Begin another search: an order of the runs drawn from the seed and this name."""
        self._rng = np.random.default_rng([self.seed, *name.encode()])
        self._order = {plan: self._rng.permutation(len(rows)) for plan, rows in self._whole.items()}
        self._n_asked: dict[Plan, int] = defaultdict(int)
        self.now_s = 0.0

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = WHOLE_RUN) -> Trial:
        if kind not in PROBES and not self._find_runs(plan):
            reason = "it is off the recorded grid"
            return build_row(plan, id=id, why=why, kind=kind, status="error", reason=reason)
        row = self._find_part_row(plan, kind) if kind in PROBES else self._find_whole(plan)
        if row is None or row.status == "skipped":
            reason = "not recorded, because a smaller batch of the same line ran out of memory"
            return build_row(plan, id=id, why=why, kind=kind, status="out_of_memory", reason=reason)
        self.now_s += row.seconds
        return dataclasses.replace(
            row, id=id, why=why, kind=kind, plan=plan, batch_size_per_device=plan["batch_size"] // row.n_devices,
            effective_batch_size=plan.effective_batch_size,
        )  # fmt: skip

    def run_group(self, plans: Mapping[str, Plan], *, why: str) -> list[Trial]:
        """Draw a rate for each plan from its recorded groups, or else from its whole runs."""
        found = {id: self._find_runs(plan) for id, plan in plans.items()}
        failed = [self(plans[id], id=id, why=why, kind=IN_TURNS) for id, runs in found.items() if not _went_well(runs)]
        if failed:
            return failed
        self.now_s += GROUP_ROW_S * len(plans)
        return [
            build_turns_row(
                plan, Turns(samples_per_s=float(self._rng.choice(self._list_rates(plan))), stalled_pct=0.0), id=id,
                why=why, seconds=GROUP_ROW_S, n_devices=found[id][0].n_devices,
            )
            for id, plan in plans.items()
        ]  # fmt: skip

    def _list_rates(self, plan: Plan) -> list[float]:
        return self._turns.get(plan) or [row.samples_per_s or 0.0 for row in self._whole[plan]]

    def _find_runs(self, plan: Plan) -> Sequence[Trial]:
        if plan not in self._whole and plan in self._grid:
            raise KeyError(f"{self.recording.name} holds no run of {plan!r}")
        return self._whole.get(plan, ())

    def _find_whole(self, plan: Plan) -> Trial:
        order = self._order[plan]
        number = self._n_asked[plan]
        self._n_asked[plan] += 1
        return self._whole[plan][order[number % len(order)]]

    def _find_part_row(self, plan: Plan, kind: str) -> Trial | None:
        """Return None for a device probe above one that ran out of memory: such are not run."""
        part = find_part(plan, kind)
        if (kind, part) in self._parts:
            return self._parts[kind, part]
        for (of, _), row in self._parts.items():
            is_smaller = row.plan["batch_size"] < part["batch_size"] and find_line(row.plan) == find_line(part)
            if of == kind and row.status == "out_of_memory" and is_smaller:
                return None
        raise KeyError(f"{self.recording.name} holds no {kind} probe of {part!r}")

    def find_rates(self) -> Mapping[Plan, float]:
        """Return the median samples/s of each plan that always ran well: in turns, or else of whole runs."""
        return {
            plan: statistics.median(self._list_rates(plan)) for plan, rows in self._whole.items() if _went_well(rows)
        }

    def true_memory_gib(self, plan: Plan) -> float:
        """Return the largest peak among the runs of the plan; 0 where none was read."""
        return max((row.device_memory_peak_gib or 0.0 for row in self._whole[plan]), default=0.0)


def _read_turns(recording: GridRecording) -> dict[Plan, list[float]]:
    """Return each plan's samples/s in its groups, scaled so that the user's own is as fast in all."""
    groups: dict[int | None, dict[Plan, float]] = defaultdict(dict)
    for row in recording.rows:
        if row.kind == IN_TURNS and row.status == "ok":
            groups[row.group][row.plan] = row.samples_per_s or 0.0
    own = recording.user_plan
    whole = [group for group in groups.values() if own in group]
    level = statistics.median(group[own] for group in whole) if whole else 0.0
    rates: dict[Plan, list[float]] = defaultdict(list)
    for group in whole:
        for plan, rate in group.items():
            rates[plan].append(rate / group[own] * level)
    return dict(rates)


def _went_well(runs: Sequence[Trial]) -> bool:
    return bool(runs) and all(row.status == "ok" for row in runs)
