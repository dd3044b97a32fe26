"""Where a run is, and the loss on its way there: counted on the host, read from the device an interval late."""

import dataclasses
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.engine.step.train_step import StepOutcome
from fulltilt.errors import UsageError
from fulltilt.measure.nested import list_tensors


@dataclasses.dataclass(kw_only=True)
class Progress:
    """The position of a run. Whole numbers and floats only: it is saved as it stands."""

    epoch: int = 0  # under way; its end counts to it until ``next_epoch``
    step: int = 0  # optimizer steps since the start of the run
    step_in_epoch: int = 0
    samples_in_epoch: int = 0  # the index in the epoch's order where a resumed run goes on
    micro_in_epoch: int = 0  # micro-batches consumed, for data that streams and cannot jump
    n_samples: int = 0
    training_seconds: float = 0.0
    epoch_seconds: float = 0.0
    epoch_sums: dict[str, float] = dataclasses.field(default_factory=dict)  # of loss and metrics, as far as read back
    is_epoch_announced: bool = False  # the listeners know of its end; its evaluation is still missing
    evaluated_step: int = -1  # of the newest evaluation
    last_loss: float | None = None
    loss_only_epoch: int = -1  # went on with other training metrics: of this epoch only the loss has a whole sum

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

    def compute_epoch_means(self) -> dict[str, float]:
        sums, n_samples = self.epoch_sums, max(1, self.samples_in_epoch)
        is_loss_only = self.loss_only_epoch == self.epoch
        return {name: total / n_samples for name, total in sums.items() if name == "loss" or not is_loss_only}


class Keeper:
    """Keeps a tensor readable after the next step, and copies it only where that is needed.

    A model with buffers of its own (a captured CUDA graph) returns its loss in the same memory at every step, and the
    next step overwrites it: the first tensor is copied, and so is each that lies where the one before it lay. That
    memory is held until then, or the allocator could have given it away. A part of a larger tensor is copied too: it
    would keep all of it.
    """

    def __init__(self) -> None:
        self._last: torch.UntypedStorage | None = None

    def keep(self, value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.nbytes() > value.nbytes:
            self._last = None
            return value.clone()
        last, self._last = self._last, storage
        return value.clone() if last is None or storage._cdata == last._cdata else value


N_HELD = 16  # micro-batches; one value a sample each
Metrics = Mapping[str, Callable[[Any, Any], Tensor]]
"""Name → function of outputs and targets that gives one value a sample."""


class LossMeter:
    """Collects the loss of every step and sums of metrics over samples. ``add`` and ``observe`` never synchronise.

    Nothing is summed step by step, because each operator costs the host some microseconds: losses are summed on the
    host when they are read, in double precision, and the values of metrics are held as they come and summed up to
    ``N_HELD`` at a time.

    Of several ranks each adds its parts, and ``take`` joins them: all read the same figures.
    """

    def __init__(self, device: torch.device, metrics: Metrics | None = None, world: World = ALONE):
        self._device, self._world = device, world
        self._metrics = dict(metrics or {})
        self._names = ("loss", *self._metrics)
        self._loss_keeper, self._keepers = Keeper(), [Keeper() for _ in self._metrics]
        self._has_looked = False
        self._start()

    @property
    def n_steps(self) -> int:
        return len(self._losses)

    @property
    def n_samples(self) -> int:
        return sum(self._counts)

    def add(self, loss: Tensor, n_samples: int) -> None:
        """Count a step that is over."""
        self._losses.append(self._loss_keeper.keep(loss))
        self._counts.append(n_samples)
        self._n_whole = len(self._observed)
        if self._n_whole >= N_HELD:
            self._sum_held()

    def observe(self, outputs: Any, targets: Any) -> None:
        """Compute the metrics of a micro-batch of the step under way; those of the first one are looked at."""
        values = [metric(outputs, targets) for metric in self._metrics.values()]
        if not self._has_looked:
            self._has_looked = True
            sizes = [len(tensor) for tensor in list_tensors((targets, outputs)) if tensor.dim()]
            for name, value in zip(self._metrics, values, strict=True):
                _check_values(name, value, sizes)
        self._observed.append([keeper.keep(value) for keeper, value in zip(self._keepers, values, strict=True)])

    def bring_back(self) -> None:
        """Undo what was observed since the last ``add``: of a step that is dropped."""
        del self._observed[self._n_whole :]

    def take(self) -> "Reading":
        """Return what came since the last ``take``, on its way to the host."""
        self._sum_held()
        reading = Reading(self._names, self._losses, self._counts, self._metric_sums, self._world)
        self._start()
        return reading

    def state_dict(self) -> dict[str, Any]:
        self._sum_held()
        # Before the first step of an interval there is nothing to stack.
        losses = torch.stack(self._losses) if self._losses else torch.zeros(0, device=self._device)
        sums = torch.stack(self._metric_sums) if self._metric_sums else torch.zeros(0, device=self._device)
        return {
            "losses": self._world.sum(losses).cpu(),
            "n_samples": list(self._counts),
            "names": list(self._names),
            "metric_sums": self._world.sum(sums).cpu(),
        }

    def is_of(self, state: Mapping[str, Any]) -> bool:
        """Tell whether a state was saved with the same training metrics."""
        return state["names"] == list(self._names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._start()
        # The state holds the sums of all ranks; the first one takes them, so that they count once.
        losses, sums = state["losses"], state["metric_sums"]
        if not self._world.is_first:
            losses, sums = torch.zeros_like(losses), torch.zeros_like(sums)
        self._losses = list(losses.to(self._device).unbind())
        self._counts = list(state["n_samples"])
        if self.is_of(state):
            self._metric_sums = list(sums.to(self._device).unbind())

    def _sum_held(self) -> None:
        for total, *values in zip(self._metric_sums, *self._observed[: self._n_whole], strict=True):
            if values:
                flat = [value if value.dim() == 1 else value.flatten() for value in values]
                total.add_(torch.cat(flat).sum(dtype=total.dtype))
        del self._observed[: self._n_whole]
        self._n_whole = 0

    def _start(self) -> None:
        self._losses: list[Tensor] = []
        self._counts: list[int] = []  # samples of each step
        # In float32: a sum lives for one logging interval, and those of an epoch are added up on the host in double
        # precision.
        self._metric_sums = [torch.zeros((), device=self._device) for _ in self._metrics]
        self._observed: list[list[Tensor]] = []  # a micro-batch's values each, metric by metric
        self._n_whole = 0  # of those; the others are of a step that is under way


def _check_values(name: str, values: Any, sizes: Sequence[int]) -> None:
    """Refuse a mean over the batch, or values of parts of a sample: summed over samples they are no mean of those."""
    is_tensor = isinstance(values, Tensor)
    if is_tensor and (values.dim() == 1 or not sizes or values.numel() in sizes):
        return
    what = f"a tensor of shape {tuple(values.shape)}" if is_tensor else type(values).__name__
    remedy = "average within each, by .flatten(1).mean(1)" if is_tensor and values.dim() else "leave out .mean()"
    remedy = remedy if is_tensor or isinstance(values, float) else "a tensor"
    raise UsageError(f"metric {name} returned {what}; it must return one value a sample, (B,): {remedy}")


class Reading:
    """Losses and sums of metrics on their way to the host. ``read_sums`` waits for the copy, not for later work.

    Attributes:
        losses: Of every step since the last ``take`` or a resume; known once ``read_sums`` returned.
    """

    def __init__(
        self, names: tuple[str, ...], losses: list[Tensor], counts: list[int], metric_sums: list[Tensor], world: World
    ):
        self._names, self._counts = names, counts
        self.n_samples, self.n_steps = sum(counts), len(counts)
        self.losses: list[float] = []
        self._values = torch.stack([*losses, *metric_sums])
        self._wait = world.start_sum(self._values) if world.is_divided else None
        self._event: torch.cuda.Event | None = None
        if self._values.is_cuda:
            on_device, self._values = self._values, torch.empty(len(self._values), pin_memory=True)
            self._values.copy_(on_device, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(on_device.device))

    def read_sums(self) -> dict[str, float]:
        if self._wait is not None:
            self._wait()
        if self._event is not None:
            self._event.synchronize()
        values = self._values.tolist()
        self.losses = values[: self.n_steps]
        loss_sum = sum(map(operator.mul, self.losses, self._counts))
        return dict(zip(self._names, [loss_sum, *values[self.n_steps :]], strict=True))


class Stopwatch:
    """Bills seconds of training to ``progress``: no evaluation, no checkpoint, nothing before the first step.

    Attributes:
        interval_s: Billed seconds of the logging interval under way.
    """

    def __init__(self, progress: Progress):
        self._progress = progress
        self._since: float | None = None
        self._kept = 0.0
        self.interval_s = 0.0

    def start(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def keep(self) -> None:
        """Note where a whole step ended."""
        self._kept = time.perf_counter()

    def bring_back(self) -> None:
        """Stop, and bill nothing of the step that did not become whole."""
        if self._since is not None:
            self.read(max(self._since, self._kept))
            self._since = None

    def read(self, until: float | None = None) -> None:
        """Bill the time so far, and go on."""
        if self._since is not None:
            now = time.perf_counter() if until is None else until
            seconds, self._since = now - self._since, now
            self.interval_s += seconds
            self._progress.training_seconds += seconds
            self._progress.epoch_seconds += seconds

    def stop(self) -> None:
        self.read()
        self._since = None

    def take_interval(self) -> float:
        """Return the seconds of training since the last call."""
        self.read()
        seconds, self.interval_s = self.interval_s, 0.0
        return seconds
