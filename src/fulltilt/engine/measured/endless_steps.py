"""Optimizer steps for a measurement, which needs more of them than an epoch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fulltilt.engine.build.run import Run
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.train_step import StepOutcome, Timer
from fulltilt.errors import DataError
from fulltilt.measure import NullTimer


class EndlessSteps:
    """Optimizer steps over as many epochs as asked for: ends of epochs, short windows and worker starts included.

    Attributes:
        n_done: Optimizer steps taken.
        first_loss, last_loss: On the device.
    """

    def __init__(
        self,
        run: Run,
        timer: Timer,
        on_first: Callable[[StepOutcome], None] | None = None,
        batches: Iterator[Any] | None = None,
    ):
        self._run, self._timer, self._on_first = run, timer, on_first
        self._step = build_step(run)
        self._batches = batches
        self._epoch = 0
        self.n_done = 0
        self.last_loss: Tensor | None = None

    def __call__(self) -> int:
        """Take one step → samples it consumed."""
        outcome = self._step(self._batches, self._timer) if self._batches is not None else None
        if outcome is None:
            self._batches = None  # the old workers end before new ones start
            self._batches = self._run.start_epoch(self._epoch)
            self._epoch += 1
            outcome = self._step(self._batches, self._timer)
            if outcome is None:
                raise DataError(
                    f"the training set of {self._run.workload.name} yielded no batch in epoch {self._epoch}"
                )
        self.n_done += 1
        self.last_loss = outcome.loss
        if self.n_done == 1 and self._on_first is not None:
            self._on_first(outcome)
        return outcome.n_samples

    def step_on(self, batches: Iterator[Any]) -> None:
        """A step on other batches, which no phase is billed for."""
        self._step(batches, NullTimer())

    def leave_epoch(self) -> None:
        """End the epoch in progress as its last step would: workers that do not persist are gone then."""
        self._batches = None
        if not self._run.loader.persistent_workers:
            self._run.close()

    def take_batch(self) -> Any:
        """One more batch, from a new epoch when this one is over."""
        for _ in range(2):
            if self._batches is not None and (batch := next(self._batches, None)) is not None:
                return batch
            self._batches = self._run.start_epoch(self._epoch)
            self._epoch += 1
        raise DataError(f"the training set of {self._run.workload.name} yielded no batch in epoch {self._epoch}")
