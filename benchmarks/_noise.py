"""Noise of step times, simulated and recorded, as a stream of factors around 1 that a comparison draws from.

A stream gives the steps of one machine in the order they ran: ``take(n)`` are the next ``n``. What is compared takes
its times from it and multiplies an arm's by that arm's true factor, so the truth is known on real noise as well.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fulltilt.errors import DataError

VERSION = 1
RECORDER = "python -m benchmarks._noise_record NAME"
RECORDINGS = Path(__file__).parent / "recordings"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Steps of one process, in order."""

    step_us: tuple[int, ...]
    seconds: float
    cpu_pressure_pct: float | None  # share of the time in which some task waited for a core

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Stretch:
        return cls(step_us=tuple(data["step_us"]), seconds=data["seconds"], cpu_pressure_pct=data["cpu_pressure_pct"])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A file ``recordings/noise-NAME-CONDITIONS-DEVICE.json``: one stretch a line.

    Attributes:
        conditions: A word of whoever recorded it, to tell files apart; what was measured is each stretch's pressure.
    """

    version: int
    name: str
    conditions: str
    device: str
    command: str
    date: str
    how: str
    workload: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    python: str
    stretches: tuple[Stretch, ...]

    def to_text(self) -> str:
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "stretches"}
        lines = ",\n".join(json.dumps(dataclasses.asdict(s), separators=(",", ":")) for s in self.stretches)
        return f'{json.dumps(head, indent=1)[:-2]},\n "stretches": [\n{lines}\n ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a recording back.

        Raises:
            DataError: it is missing, of another version, or not a recording.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            stretches = tuple(Stretch.from_json(stretch) for stretch in data.pop("stretches"))
            found = cls(**data, stretches=stretches)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path} is no recording of noise ({error}); record one with {RECORDER}") from None
        if found.version != VERSION:
            raise DataError(f"{path} has version {found.version}, this reads {VERSION}; record it again: {RECORDER}")
        return found


class Stream:
    """The steps of one machine, in order; each can be taken once."""

    def __init__(self, steps: NDArray[np.float64]):
        self._steps, self.n_taken = steps, 0

    @property
    def n_left(self) -> int:
        return self._steps.size - self.n_taken

    def take(self, n: int) -> NDArray[np.float64]:
        """The next ``n`` step times.

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
        """Step times of one process from its start, shape ``(n_steps,)``."""
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


def list_recordings(device: str) -> list[Recording]:
    """All recordings of a device, by the names of their files."""
    return [Recording.read(path) for path in sorted(RECORDINGS.glob(f"noise-*-{device}.json"))]
