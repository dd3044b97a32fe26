"""Where a run is, and the loss on its way there: counted on the host, summed on the device."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fulltilt.engine.step import StepOutcome
from fulltilt.engine.world import ALONE, World


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The position of a run. Whole numbers and floats only: it is saved as it stands.

    Attributes:
        epoch: The epoch under way, from 0; its end counts to it until ``next_epoch``.
        step: Optimizer steps since the start of the run.
        samples_in_epoch: Samples consumed: the index in the epoch's order where a resumed run goes on.
        micro_in_epoch: Micro-batches consumed, for data that streams and cannot jump.
        epoch_sums: Sums over the samples of the epoch that were read back: the loss and the training metrics.
        is_epoch_announced: The epoch's end was told to the listeners, its evaluation is still missing.
        evaluated_step: The step of the newest evaluation.
        loss_only_epoch: The epoch that a run went on in with other training metrics: what has no sum of all its
            samples has no mean.
    """

    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0
    samples_in_epoch: int = 0
    micro_in_epoch: int = 0
    n_samples: int = 0
    training_seconds: float = 0.0
    epoch_seconds: float = 0.0
    epoch_sums: dict[str, float] = dataclasses.field(default_factory=dict)
    is_epoch_announced: bool = False
    evaluated_step: int = -1
    last_loss: float | None = None
    loss_only_epoch: int = -1

    def count(self, outcome: StepOutcome) -> None:
        _, n_samples, n_micro = outcome
        self.step += 1
        self.step_in_epoch += 1
        self.samples_in_epoch += n_samples
        self.micro_in_epoch += n_micro
        self.n_samples += n_samples

    def next_epoch(self) -> None:
        self.epoch += 1
        self.step_in_epoch = self.samples_in_epoch = self.micro_in_epoch = 0
        self.epoch_seconds = 0.0
        self.epoch_sums = {}
        self.is_epoch_announced = False

    def add_seconds(self, seconds: float) -> None:
        self.training_seconds += seconds
        self.epoch_seconds += seconds

    def compute_epoch_means(self) -> dict[str, float]:
        names = ["loss"] if self.loss_only_epoch == self.epoch else self.epoch_sums
        return {
            name: self.epoch_sums[name] / max(1, self.samples_in_epoch) for name in names if name in self.epoch_sums
        }


class LossMeter:
    """Sums of the loss and of metrics over samples. ``add`` and ``observe`` never wait for the device.

    ``bring_back`` undoes what was observed since the last ``add``: of a window that is dropped.

    Of several ranks each adds its parts, and ``take`` joins them: all read the same figures.
    """

    def __init__(
        self,
        device: torch.device,
        metrics: Mapping[str, Callable[[Any, Any], Tensor]] | None = None,
        world: World = ALONE,
    ):
        self._device, self._world = device, world
        self._metrics = dict(metrics or {})
        self._names = ("loss", *self._metrics)
        self._start([torch.zeros((), device=device) for _ in self._names])

    def add(self, loss: Tensor, n_samples: int) -> None:
        self._loss_sum.add_(loss, alpha=n_samples)
        self._losses.append(loss)
        self.n_samples += n_samples
        self.n_steps += 1
        for values in self._observed:
            for total, value in zip(self._metric_sums, values, strict=True):
                total.add_(value)
        self._observed.clear()

    def observe(self, outputs: Any, targets: Any) -> None:
        self._observed.append([metric(outputs, targets).sum() for metric in self._metrics.values()])

    def take(self) -> Reading:
        """What was summed since the last ``take``; its values are on their way to the host."""
        reading = Reading(self._names, self._sums, self.n_samples, self.n_steps, self._losses, self._world)
        self._start([torch.zeros((), device=self._device) for _ in self._names])
        return reading

    def bring_back(self) -> None:
        self._observed.clear()

    def state_dict(self) -> dict[str, Any]:
        sums = self._world.sum(torch.stack(self._sums)).cpu()
        return {"sums": sums, "names": list(self._names), "n_samples": self.n_samples, "n_steps": self.n_steps}

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Whether a state was saved with the same training metrics."""
        return state.get("names", self._names[: len(state["sums"])]) == list(self._names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        n_known = len(self._sums) if self.is_of(state) else 1  # with other training metrics only the loss is the same
        for total, saved in zip(self._sums[:n_known], state["sums"], strict=False):
            total.copy_(saved if self._world.is_first else torch.zeros_like(saved))
        self.n_samples, self.n_steps = state["n_samples"], state["n_steps"]

    def _start(self, sums: list[Tensor]) -> None:
        # A tensor each: adding into a part of a shared one takes 1.6 µs, into one of its own 1.1. In float32 like the
        # loss itself, else every add converts (6.6 µs): a sum lives for one logging interval, and the intervals of an
        # epoch are added up on the host in double precision.
        self._sums = sums
        self._loss_sum, *self._metric_sums = sums
        self._observed: list[list[Tensor]] = []  # a micro-batch's sums each, of the window that is not whole yet
        self._losses: list[Tensor] = []  # references only: what a loss that is not finite is looked for in
        self.n_samples = self.n_steps = 0


class Reading:
    """Sums of one value each, on their way to the host; nothing may be added to them any more.

    ``read_sums`` waits for the copy and not for what was queued after it.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        sums: list[Tensor],
        n_samples: int,
        n_steps: int,
        losses: list[Tensor],
        world: World = ALONE,
    ):
        self._names, self.n_samples, self.n_steps = names, n_samples, n_steps
        self._losses, self._world = losses, world
        self._wait: Callable[[], None] | None = None
        if world.is_divided:
            joined = torch.stack(sums)
            self._wait = world.start_sum(joined)
            sums = list(joined.unbind())
        self._sums = sums
        self._event: torch.cuda.Event | None = None
        if sums[0].is_cuda:
            host = torch.empty(len(sums), pin_memory=True)
            host.copy_(torch.stack(sums), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(sums[0].device))
            self._sums = list(host.unbind())

    def read_sums(self) -> dict[str, float]:
        if self._wait is not None:
            self._wait()
        if self._event is not None:
            self._event.synchronize()
        return {name: total.tolist() for name, total in zip(self._names, self._sums, strict=True)}

    def read_losses(self) -> list[float]:
        """The loss of every step since the last ``take`` or a resume. Waits for the device, and for all ranks."""
        return self._world.sum(torch.stack(self._losses)).tolist() if self._losses else []


class Stopwatch:
    """Seconds of training, without evaluation, checkpoints and the time before the first step."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._since: float | None = None
        self._mark = 0.0

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def read(self) -> float:
        """Bill the time so far and go on; seconds of training since the start of the run."""
        if self._since is not None:
            now = time.perf_counter()
            self._progress.add_seconds(now - self._since)
            self._since = now
        return self._progress.training_seconds

    def stop(self) -> None:
        self.read()
        self._since = None

    def take_interval(self) -> float:
        """Seconds of training since the last call."""
        seconds = self.read() - self._mark
        self._mark += seconds
        return seconds

    @property
    def interval_s(self) -> float:
        """Billed seconds of the interval under way."""
        return self._progress.training_seconds - self._mark

    def restart(self, interval_s: float = 0.0) -> None:
        """After a resume: the interval under way has taken ``interval_s`` already, as its samples are counted."""
        self._mark = self._progress.training_seconds - interval_s
