"""Noise of step times, simulated and recorded: the steps of one machine in the order they ran.

A comparison takes its times from such a stream and multiplies an arm's by that arm's true factor, so the truth is known
on real noise as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulltilt.records import decode

RECORDINGS = Path(__file__).parent / "recordings"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Steps of one process, in order."""

    step_us: tuple[int, ...]
    seconds: float
    cpu_pressure_pct: float | None  # share of the time in which some task waited for a core


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The content of a file ``recordings/noise-NAME-CONDITIONS-DEVICE.json``."""

    version: int
    name: str
    conditions: str  # a word of whoever recorded it; what was measured is each stretch's pressure
    device: str
    command: str
    date: str
    how: str
    workload: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    python: str
    stretches: tuple[Stretch, ...]


class Stream:
    """The steps of one machine, in order; each can be taken once."""

    def __init__(self, steps: NDArray[np.float64]):
        self._steps, self.n_taken = steps, 0

    @property
    def n_left(self) -> int:
        return self._steps.size - self.n_taken

    def take(self, n: int) -> NDArray[np.float64]:
        """Return the next ``n`` step times.

        Raises:
            ValueError: fewer are left; a comparison on fewer steps than it asked for would look quieter.
        """
        if n > self.n_left:
            raise ValueError(f"{n} steps asked for, {self.n_left} are left; simulate or record more")
        self.n_taken += n
        return self._steps[self.n_taken - n : self.n_taken]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoiseModel:
    """What disturbs a step on a simulated machine. Times are around 1.

    Attributes:
        jitter_pct: Standard deviation of a step.
        correlation: Of neighbouring steps' jitter: AR(1).
        drift_pct: Standard deviation of the random walk's stride, per step.
        slow_share: Steps that take ``slow_factor`` times as long: another program, a collection of garbage.
        ramp_pct: How much slower the first step is; it fades with a time constant of ``ramp_steps``.
        process_pct: Standard deviation between processes: where memory came to lie.

    Source: the noise that research on step times found to mislead tests most; sizes are assumptions, which is why
    recorded noise stands beside it.
    """

    jitter_pct: float = 2.0
    correlation: float = 0.5
    drift_pct: float = 0.05
    slow_share: float = 0.03
    slow_factor: float = 1.5
    ramp_pct: float = 0.0
    ramp_steps: float = 40.0
    process_pct: float = 0.0

    def simulate(self, n_steps: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Draw the step times of one process from its start, shape ``(n_steps,)``."""
        return np.exp(
            self._simulate_jitter(n_steps, rng)
            + np.cumsum(rng.normal(0, self.drift_pct / 100, n_steps))
            + self.ramp_pct / 100 * np.exp(-np.arange(n_steps) / self.ramp_steps)
            + rng.normal(0, self.process_pct / 100)
        ) * np.where(rng.random(n_steps) < self.slow_share, self.slow_factor, 1.0)

    def _simulate_jitter(self, n_steps: int, rng: np.random.Generator) -> NDArray[np.float64]:
        scale = self.jitter_pct / 100
        fresh = rng.normal(0, scale * math.sqrt(1 - self.correlation**2), n_steps)
        jitter, last = np.empty(n_steps), rng.normal(0, scale)
        for index in range(n_steps):
            last = self.correlation * last + fresh[index]
            jitter[index] = last
        return jitter


def read_recordings(device: str) -> list[Recording]:
    """Read all recordings of a device, by the names of their files."""
    paths = sorted(RECORDINGS.glob(f"noise-*-{device}.json"))
    return [decode(Recording, json.loads(path.read_text(encoding="utf-8"))) for path in paths]
