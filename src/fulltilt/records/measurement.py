"""The figures of one trial: phases, throughput, memory. ``None`` means not read."""

import dataclasses
from typing import Any

PHASES = ("data_wait", "h2d", "forward", "backward", "optimizer", "other")
"""Phases of one optimizer step, in their order. They sum to ``step``; ``other`` is the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhasesMs:
    """Mean milliseconds per optimizer step (all micro-steps of an accumulation window together)."""

    data_wait: float | None
    h2d: float | None
    forward: float | None
    backward: float | None
    optimizer: float | None
    other: float | None
    step: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What was measured of one trial. A probe leaves None what it did not run."""

    phases_ms: PhasesMs | None = None
    samples_per_s: float | None = None
    samples_per_s_ci95: tuple[float, float] | None = None
    block_samples_per_s: tuple[float, ...] = ()  # one figure per timed block: the unit of replication
    n_steps: int = 0  # timed optimizer steps
    receive_ms: float | None = None  # loader probes with workers: one next() of a full queue, in the main process
    first_step_s: float | None = None  # build of kernels, compile, worker start
    gpu_utilization_pct: float | None = None
    memory_allocated_peak_gib: float | None = None
    memory_reserved_peak_gib: float | None = None
    memory_rss_peak_gib: float | None = None  # process tree
    memory_peak_part: str | None = None  # of a whole run, the fullest: engine.rehearsal.Part
    flops_per_sample: float | None = None
    flops_coverage_pct: float | None = None  # share of the step's operator calls whose FLOPs are known
    cpu_pressure_pct: float | None = None  # PSI "some", over the timed blocks
    steal_pct: float | None = None
    notes: tuple[str, ...] = ()  # contended blocks, a warm-up that did not end: what doubts the figure
    observed: dict[str, Any] = dataclasses.field(default_factory=dict)  # lever → value read back inside the run
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def device_memory_peak_gib(self) -> float | None:
        """Peak memory of the device used: reserved by the allocator on a GPU, of the process tree on a CPU."""
        reserved_gib = self.memory_reserved_peak_gib
        return reserved_gib if reserved_gib is not None else self.memory_rss_peak_gib


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measurement(Figures):
    """What a trial process answers: its figures, its warm-up and its losses."""

    n_warmup_steps: int
    first_loss: float | None = None
    last_loss: float | None = None


def format_rate(per_s: float) -> str:
    """Format a rate: ``1,234``, and below 100 three figures: ``3.22``, ``0.004``."""
    return f"{per_s:,.0f}" if abs(per_s) >= 100 else f"{per_s:.3g}"
