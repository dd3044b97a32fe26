"""Blocks of training steps: timed between two edges, with what else ran on the machine meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fulltilt.hardware import CpuTimes, Pressure, compute_steal_pct
from fulltilt.measure.clock import Clock
from fulltilt.measure.phase_timer import NullTimer, PhaseTimer, StepSample

STEAL_LIMIT_PCT = 5.0
PRESSURE_RISE_LIMIT_PCT = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Steps between two synchronised edges.

    Attributes:
        stage: "warmup" blocks do not count.
        cpu_pressure_pct: Share of the block's time in which at least one task waited for a core; None: not read.
        steal_pct: Share of all cores' time that the host gave to others; None: not read.
        n_steal_jiffies: The same in clock ticks: on a short block one tick is many percent.
        steps: Steps with their phases, empty without a phase timer.
    """

    stage: Literal["warmup", "measure"]
    n_steps: int
    n_samples: int
    seconds: float
    cpu_pressure_pct: float | None = None
    steal_pct: float | None = None
    n_steal_jiffies: int = 0
    steps: tuple[StepSample, ...] = ()

    @property
    def samples_per_s(self) -> float:
        return self.n_samples / self.seconds


@dataclasses.dataclass(slots=True)
class BlockRunner:
    """Runs blocks one after the other; the device is synchronised at their edges only."""

    run_step: Callable[[], int]
    clock: Clock
    timer: PhaseTimer | NullTimer
    synchronize: Callable[[], Any]
    read_pressure: Callable[[], Pressure] | None
    read_cpu_times: Callable[[], CpuTimes] | None
    on_block: Callable[[Block], None] | None
    begin_block: Callable[[int], Any]

    def run_block(self, n_steps: int, stage: Literal["warmup", "measure"]) -> Block:
        timer, run_step = self.timer, self.run_step
        self.begin_block(n_steps)
        self.synchronize()
        timer.take_steps()
        timer.pause()
        pressure = self.read_pressure() if self.read_pressure else None
        times = self.read_cpu_times() if self.read_cpu_times else None
        begin_ns = self.clock.host_ns()
        n_samples = 0
        for _ in range(n_steps):
            timer.start_step()
            n = run_step()
            if timer.in_step:
                timer.end_step(n)
            n_samples += n
        self.synchronize()
        seconds = (self.clock.host_ns() - begin_ns) / 1e9
        if n_samples <= 0:
            raise ValueError(f"{n_steps} steps consumed {n_samples} samples; run_step returns the samples of its step")
        steal_pct, n_steal = self._read_steal(times)
        block = Block(
            stage=stage,
            n_steps=n_steps,
            n_samples=n_samples,
            seconds=max(seconds, 1e-9),
            cpu_pressure_pct=self._read_pressure_pct(pressure, seconds),
            steal_pct=steal_pct,
            n_steal_jiffies=n_steal,
            steps=tuple(timer.take_steps()),
        )
        if self.on_block:
            self.on_block(block)
        return block

    def _read_pressure_pct(self, before: Pressure | None, seconds: float) -> float | None:
        if before is None or self.read_pressure is None or before.some_total_us is None or seconds <= 0:
            return None
        after = self.read_pressure().some_total_us
        return None if after is None else min(100.0, (after - before.some_total_us) / (seconds * 1e6) * 100)

    def _read_steal(self, before: CpuTimes | None) -> tuple[float | None, int]:
        if before is None or self.read_cpu_times is None:
            return None, 0
        after = self.read_cpu_times()
        if before.steal_jiffies is None or after.steal_jiffies is None:
            return None, 0
        return compute_steal_pct(before, after), after.steal_jiffies - before.steal_jiffies


def find_contended(blocks: Sequence[Block]) -> list[int]:
    """Indices of contended blocks, the worst first: judged by the readings and never by the speed.

    A plan may put pressure on the cores by its own workers, in every block alike; so pressure counts as far as it is
    above that of the quieter blocks.
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
