"""Take batches and optimizer steps without end, for measurements that need more than an epoch has."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from fulltilt.engine.build.run import Run
from fulltilt.engine.step.cached_step import build_step
from fulltilt.engine.step.train_step import StepOutcome, Timer, fetch_batches
from fulltilt.measure import NullTimer


class EndlessBatches:
    """Takes one batch after another, and begins a new epoch whenever one is over.

    Args:
        batches: Taken before the first epoch begins.

    Attributes:
        n_epochs: Epochs that have begun.
        n_taken: Batches that ``take_batch`` gave.
    """

    def __init__(self, run: Run, batches: Iterator[Any] | None = None):
        self._run, self._batches = run, batches
        self.n_epochs = 0
        self.n_taken = 0

    def start_epoch(self) -> None:
        """Leave the epoch in progress, and begin the next one."""
        self._batches = None  # the old workers end before new ones start
        self._batches = self._run.start_epoch(self.n_epochs)
        self.n_epochs += 1

    def take_batch(self) -> Any:
        """Take one batch, from a new epoch when this one is over."""
        for is_new in (False, True):
            if is_new or self._batches is None:
                self.start_epoch()
            batch = next(fetch_batches(self._batches), None)  # type: ignore[arg-type]
            if batch is not None:
                self.n_taken += 1
                return batch
        raise self._run.build_empty_error(self.n_epochs)


class EndlessSteps(EndlessBatches):
    """Takes one optimizer step a call without end; a call includes ends of epochs and worker starts.

    Attributes:
        n_done: Optimizer steps taken.
        last_loss: On the device.
    """

    def __init__(
        self,
        run: Run,
        timer: Timer,
        on_first: Callable[[StepOutcome], None] | None = None,
        batches: Iterator[Any] | None = None,
    ):
        super().__init__(run, batches)
        self._timer, self._on_first = timer, on_first
        self._step = build_step(run)
        self.n_done = 0
        self.last_loss: Tensor | None = None

    def __call__(self) -> int:
        """Take one step; return the samples it consumed."""
        outcome = self._step(self._batches, self._timer) if self._batches is not None else None
        if outcome is None:
            self.start_epoch()
            outcome = self._step(self._batches, self._timer)  # type: ignore[arg-type]
            if outcome is None:
                raise self._run.build_empty_error(self.n_epochs)
        self.n_done += 1
        self.last_loss = outcome.loss
        if self.n_done == 1 and self._on_first is not None:
            self._on_first(outcome)
        return outcome.n_samples

    def step_on(self, batches: Iterator[Any]) -> None:
        """Take a step on other batches without timing its phases."""
        self._step(batches, NullTimer())

    def leave_epoch(self) -> None:
        """End the epoch in progress, and with it the data workers that do not persist."""
        self._batches = None
        if not self._run.loader.persistent_workers:
            self._run.close()
