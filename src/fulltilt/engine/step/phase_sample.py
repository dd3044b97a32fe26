"""The phases of one step in each logging interval: where the time goes, at a fraction of a microsecond a step."""

from __future__ import annotations

from collections import deque

import torch

from fulltilt.engine.step.train_step import Timer
from fulltilt.measure import CudaClock, HostClock, NullTimer, PhaseTimer
from fulltilt.measure.phase_timer import StepSample

N_EVENTS = 32  # a step in flight, and the one before it


def join_timers(timer: Timer, marks: Timer | None) -> Timer:
    """Return a timer that hands its laps on to ``marks``, where there are any."""
    return timer if marks is None else _Both(timer, marks)


class _Both:
    def __init__(self, timer: Timer, marks: Timer):
        self._timer, self._marks = timer, marks

    def lap(self, phase: str) -> None:
        self._timer.lap(phase)
        self._marks.lap(phase)


class PhaseSample:
    """Times the last step of every logging interval; the others go by untimed.

    ``marks`` are told of every phase of every step (``ranks.process.Link``).

    Device: does not synchronise; a sample is read after the sums of its interval, which come behind it in the queue.
    """

    def __init__(self, device: torch.device, log_every: int, marks: Timer | None = None):
        self._timer = PhaseTimer(CudaClock(device, N_EVENTS) if device.type == "cuda" else HostClock())
        self._untimed: Timer = marks or NullTimer()
        self._timed: Timer = join_timers(self._timer, marks)
        self._log_every = log_every
        self._samples: deque[StepSample] = deque()

    def start_step(self, n_done: int) -> Timer:
        """Return the timer of the step that comes after ``n_done`` steps."""
        if (n_done + 1) % self._log_every:
            return self._untimed
        self._timer.pause()
        self._timer.start_step()
        return self._timed

    def end_step(self, n_samples: int) -> None:
        """End the timed step."""
        self._timer.end_step(n_samples)
        self._timer.pause()

    def take_ms(self) -> dict[str, float | None]:
        """Return the oldest sample not taken yet: ms by phase, ``step`` being the whole; empty where there is none."""
        self._samples.extend(self._timer.take_steps())
        if not self._samples:
            return {}
        sample = self._samples.popleft()
        whole = sample.step_wall_ms if sample.step_device_ms is None else sample.step_device_ms
        return {**sample.phases_ms, "step": whole}
