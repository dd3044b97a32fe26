"""The request to a trial process, and the row that comes of it."""

import dataclasses
from typing import Any, Literal

from fulltilt.records.measurement import Figures
from fulltilt.records.plan import Plan

Status = Literal["ok", "out_of_memory", "timeout", "error", "skipped"]

WHOLE_RUN = "end_to_end"
"""The kind of trial that runs the training step with its loader, an evaluation and a checkpoint."""

IN_TURNS = "repeat"
"""The kind of row that has the speed of a plan whose process took turns with those of others, and no other figure."""

TurnsWay = Literal["usual", "passive", "pinned", "whole"]
"""How plans took turns: as usual; with threads that sleep while they wait; these on a core each; one after another."""

BUSY_PCT = 50.0
"""``cpu_pressure_pct`` above which a row's figures are those of a busy machine."""

PROBES = ("device", "loader", "memory", "fit", "inference")
"""Kinds that run a part: the step on batches already on the device, the loader alone, one step on fake tensors, a few
steps and what comes beside them (does it fit?), the model alone as it answers."""


_LEAST = {
    "samples_per_s": 0.0,
    "seconds": 0.0,
    "memory_allocated_peak_gib": 0.0,
    "memory_reserved_peak_gib": 1e-9,
    "memory_rss_peak_gib": 1e-9,
}
"""The tuner's models cannot be fitted to smaller figures."""


def is_busy_pressure(cpu_pressure_pct: float | None) -> bool:
    """Whether figures measured under this pressure are those of a busy machine."""
    return (cpu_pressure_pct or 0.0) > BUSY_PCT


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSource:
    """What a trial process builds the workload from: a resolved configuration, which may name ``module:object``.

    ``pickled`` is base64 cloudpickle of a Workload that has no import path (a notebook's); it travels from a parent to
    its own child only.
    """

    config: dict[str, Any]
    base_dir: str  # relative paths in the configuration start here
    provenance: dict[str, str] = dataclasses.field(default_factory=dict)  # where values came from, for messages
    import_paths: tuple[str, ...] = ()  # put in front of sys.path
    pickled: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialRequest:
    """A request to a trial process, sent as one JSON line; without id and plan, what the requests of a search share."""

    id: str = ""
    source: WorkloadSource
    plan: Plan = dataclasses.field(default_factory=Plan)
    device: str  # "cpu", "cuda", "cuda:1"
    n_steps: int = 20  # timed optimizer steps at least; blocks may need more
    settles: bool = False  # switches of the plan that cannot apply there take their default; else the trial fails
    kind: str = "trial"  # what to do with it: a name of ``tuner.trials.kinds.KINDS``
    seed: int = 0
    memory_limit_bytes: int | None = None  # of each rank
    deadline_s: float = 120.0
    patience_s: float = 120.0  # what the deadline is where no budget cuts it: ranks that are slower hang
    max_measure_s: float | None = None  # stop adding blocks after this long, once n_steps are in
    rank_devices: tuple[str, ...] = ()  # of whole runs, one process each; empty: one process on ``device``


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trial(Figures):
    """One row of ``trials.jsonl`` and of the JSON contract."""

    id: str
    plan: Plan
    status: Status
    reason: str | None = None
    why: str | None = None  # why the search chose this trial
    predicted_samples_per_s: float | None = None  # by the search's models before the run; of whole runs that they chose
    kind: str = "end_to_end"  # WHOLE_RUN, IN_TURNS or one of PROBES
    group: int | None = None  # of rows in turns: those of one group lived at the same time; from 1
    stalled_pct: float | None = None  # of rows in turns: of the time, that of steps over five times as long as usual
    turns: TurnsWay | None = None  # of rows in turns that are ok
    n_devices: int = 1
    batch_size_per_device: int = 0
    effective_batch_size: int = 0
    seconds: float = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a busy machine ran it."""
        return is_busy_pressure(self.cpu_pressure_pct)


def find_damage(trial: Trial) -> str | None:
    """Return which figure of a row no run can have measured; None where all are possible."""
    if trial.status == "ok" and trial.kind != "memory" and not trial.samples_per_s:
        return f"status is ok, and samples_per_s is {trial.samples_per_s}"
    for name, least in _LEAST.items():
        value = getattr(trial, name)
        if value is not None and not least <= value <= 1e15:
            return f"{name} is {value:g}, which nothing takes or reaches"
    rate, blocks = trial.samples_per_s, trial.block_samples_per_s
    if rate and blocks and not min(blocks) * (1 - 1e-9) <= rate <= max(blocks) * (1 + 1e-9):
        return f"samples_per_s is {rate:g}, which is no mean of its blocks ({min(blocks):g} to {max(blocks):g})"
    return None
