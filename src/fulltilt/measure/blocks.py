"""Time blocks of training steps between two edges, and read what else ran on the machine meanwhile."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fulltilt.hardware import CpuTimes, Pressure, compute_steal_pct
from fulltilt.measure.phase_timer import NullTimer, PhaseTimer, StepSample

STEAL_LIMIT_PCT = 5.0
PRESSURE_RISE_LIMIT_PCT = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Steps between two synchronised edges."""

    stage: Literal["warmup", "measure"]  # warm-up blocks do not count
    n_steps: int
    n_samples: int
    seconds: float
    cpu_pressure_pct: float | None = None  # share of the time in which a task waited for a core; None: no reading
    steal_pct: float | None = None  # share of all cores' time that the host gave to others; None: no reading
    n_steal_jiffies: int = 0  # the same in clock ticks: on a short block one tick is many percent
    steps: tuple[StepSample, ...] = ()  # with their phases; empty without a phase timer

    @property
    def samples_per_s(self) -> float:
        return self.n_samples / self.seconds


@dataclasses.dataclass(slots=True)
class BlockRunner:
    """Runs blocks one after the other; the device is synchronised at their edges only."""

    run_step: Callable[[], int]
    timer: PhaseTimer | NullTimer
    synchronize: Callable[[], Any]
    read_pressure: Callable[[], Pressure]
    read_cpu_times: Callable[[], CpuTimes]
    on_block: Callable[[Block], None] | None
    begin_block: Callable[[int], Any]

    def run_block(self, n_steps: int, stage: Literal["warmup", "measure"]) -> Block:
        """Run and time one block.

        Raises:
            ValueError: the steps consumed no samples.
        """
        timer, run_step = self.timer, self.run_step
        self.begin_block(n_steps)
        self.synchronize()
        timer.take_steps()
        timer.pause()
        pressure, times = self.read_pressure(), self.read_cpu_times()
        begin_ns = timer.clock.host_ns()
        n_samples = 0
        for _ in range(n_steps):
            timer.start_step()
            n = run_step()
            if timer.in_step:
                timer.end_step(n)
            n_samples += n
        self.synchronize()
        seconds = (timer.clock.host_ns() - begin_ns) / 1e9
        if n_samples <= 0:
            raise ValueError(f"{n_steps} steps consumed {n_samples} samples; run_step returns the samples of its step")
        times_after = self.read_cpu_times()
        block = Block(
            stage=stage,
            n_steps=n_steps,
            n_samples=n_samples,
            seconds=max(seconds, 1e-9),
            cpu_pressure_pct=_compute_pressure_pct(pressure, self.read_pressure(), seconds),
            steal_pct=compute_steal_pct(times, times_after),
            n_steal_jiffies=(times_after.steal_jiffies or times.steal_jiffies or 0) - (times.steal_jiffies or 0),
            steps=tuple(timer.take_steps()),
        )
        if self.on_block:
            self.on_block(block)
        return block


def _compute_pressure_pct(before: Pressure, after: Pressure, seconds: float) -> float | None:
    if before.some_total_us is None or after.some_total_us is None or seconds <= 0:
        return None
    return min(100.0, (after.some_total_us - before.some_total_us) / (seconds * 1e6) * 100)


def find_contended(blocks: Sequence[Block]) -> list[int]:
    """Find the indices of contended blocks, the worst first, by the readings and never by the speed.

    A plan's own workers may put pressure on the cores in every block, so only pressure above that of the quieter blocks
    counts.
    """
    pressures = sorted(b.cpu_pressure_pct for b in blocks if b.cpu_pressure_pct is not None)
    usual_pct = pressures[len(pressures) // 4] if pressures else 0.0
    excess = {}
    for index, block in enumerate(blocks):
        steal_pct = block.steal_pct if block.steal_pct is not None and block.n_steal_jiffies >= 3 else 0.0
        rise_pct = 0.0 if block.cpu_pressure_pct is None else block.cpu_pressure_pct - usual_pct
        if steal_pct > STEAL_LIMIT_PCT or rise_pct > PRESSURE_RISE_LIMIT_PCT:
            excess[index] = max(steal_pct / STEAL_LIMIT_PCT, rise_pct / PRESSURE_RISE_LIMIT_PCT)
    return sorted(excess, key=lambda index: -excess[index])
