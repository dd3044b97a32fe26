"""One optimizer step: forward and backward of each micro-batch in an accumulation window, then the update.

Nothing in a step waits for the device: the loss stays a tensor there, to be read later. The one exception is torch's:
an fp16 scaler with an optimizer that is not fused reads ``found_inf`` on the host.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from fulltilt.data import BatchTransform, explain_loader_error
from fulltilt.errors import DataError, UsageError
from fulltilt.levers import Setup
from fulltilt.measure.nested import SEQUENCES, count_samples, find_tensor, list_tensors, map_tensors
from fulltilt.tasks import Workload

_END = object()

Doing = Literal["step", "update", "evaluation", "assessment", "elsewhere"]


class StepOutcome(NamedTuple):
    """What one optimizer step did."""

    loss: Tensor  # mean over the window's samples, on the device, detached; of several ranks this one's summand
    n_samples: int
    n_micro: int


class Timer(Protocol):
    """Bills the time since the last lap to a phase."""

    def lap(self, phase: str) -> None: ...


class StepParts(Protocol):
    """What a step needs of a run."""

    setup: Setup
    workload: Workload
    batch_size: int
    clip_norm: float | None
    generator: torch.Generator
    transform: BatchTransform | None
    sync: Callable[[bool], None] | None
    doing: Doing
    world: Any  # of ``ranks/world.py``: how many processes train together


class Micro(NamedTuple):
    """A micro-batch that is ready for the model."""

    batch: Any
    n_samples: int  # of all ranks
    n_local: int  # of this one; 0 where another sample stands in, which does not count


class TrainStep:
    """Takes one optimizer step: ``_next_micro`` and ``_forward`` for each micro-batch of a window, then ``_update``.

    The window's gradient is the gradient of the mean loss over its samples, as if they had been one batch: each
    micro-batch weighs by its share of samples, and a window that the epoch's end cuts short is scaled back up before
    clipping. Ranks average their gradients, so each weighs its part of a micro-batch likewise; ``batches`` then tells
    how large the whole is (``ranks/parallel.py``).

    Args:
        run: What ``build_run`` built. Its ``doing`` tells an error's handler where the step was.
        observe: Gets the outputs and targets of every micro-batch, without gradients: for training metrics.
        forward: Computes the outputs; the run's own (the model or its compiled form) when None.

    Device: enqueues work, does not synchronise.
    """

    def __init__(
        self,
        run: StepParts,
        *,
        observe: Callable[[Any, Any], None] | None = None,
        forward: Callable[..., Any] | None = None,
    ):
        setup, workload = run.setup, run.workload
        self._run, self._state = run, setup.state
        self._model_forward, self._loss = forward or setup.forward, workload.loss
        self._prepare, self._generator = workload.prepare, run.generator
        self.transform = run.transform
        self._optimizer, self._scaler = setup.optimizer, setup.scaler
        self._parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]
        self._accumulate, self._clip_norm = setup.accumulate, run.clip_norm
        self._n_nominal = run.batch_size * setup.accumulate
        self._n_ranks, self._sync = run.world.n_ranks, run.sync
        self._must_weigh = setup.accumulate > 1 or run.world.is_divided
        self._device = setup.device
        self._on_gpu = setup.device.type != "cpu"
        self._non_blocking = self._on_gpu and bool(setup.loader_options.get("pin_memory"))
        self._memory_format = setup.input_memory_format if run.transform is None else None  # a transform sets it too
        self._must_place = self._on_gpu or self._memory_format is not None
        dtype = setup.autocast_dtype
        self._autocast = contextlib.nullcontext() if dtype is None else torch.autocast(self._device.type, dtype=dtype)
        self._observe, self._no_grad = observe, torch.no_grad()
        self._has_looked = False

    def __call__(self, batches: Iterator[Any], timer: Timer) -> StepOutcome | None:
        """Run one step; return None when ``batches`` was at its end already.

        Raises:
            WorkerDiedError: a data worker died.
            DataError: a batch is not (inputs, targets).
        """
        lap, scaler = timer.lap, self._scaler
        self._run.doing = "step"
        n_samples = n_micro = 0
        total: Tensor | None = None
        while n_micro < self._accumulate:
            micro = self._next_micro(batches, lap, is_last=n_micro + 1 == self._accumulate)
            if micro is None:
                break
            loss = self._forward(micro.batch, is_counted=micro.n_local > 0)
            if self._must_weigh:
                loss = loss * (self._n_ranks * micro.n_local / self._n_nominal)
            lap("forward")
            (loss if scaler is None else scaler.scale(loss)).backward()
            total = loss.detach() if total is None else total + loss.detach()
            n_samples += micro.n_samples
            n_micro += 1
            lap("backward")
        if total is not None:
            factor = self._n_nominal / n_samples if self._must_weigh else 1.0
            if factor != self._n_ranks:
                total = total * (factor / self._n_ranks)
            self._update(factor, n_micro)
            lap("optimizer")
        self._run.doing = "elsewhere"
        return None if total is None else StepOutcome(total, n_samples, n_micro)

    def _next_micro(self, batches: Iterator[Any], lap: Callable[[str], None], *, is_last: bool) -> Micro | None:
        """Take the next micro-batch and put it onto the device; None at the end of ``batches``."""
        batch = _fetch(batches)
        lap("data_wait")
        if batch is _END:
            return None
        n = n_local = count_samples(batch)
        if self._sync is not None:
            n, n_local = batches.n_global, batches.n_local  # type: ignore[attr-defined]
            self._sync(is_last or batches.is_last)  # type: ignore[attr-defined]
        if not self._has_looked:
            self._look_at_batch(batch, n)
        if self._must_place:
            batch = self.place(batch)
            if self._on_gpu:
                lap("h2d")
        return Micro(batch, n, n_local)

    def _forward(self, batch: Any, *, is_counted: bool = True) -> Tensor:
        """Compute the loss of a batch that lies on the device."""
        inputs, targets = self._prepare_batch(batch)
        with self._autocast:
            outputs = self._run_model(inputs)
            loss = self._compute_loss(outputs, targets, inputs)
        if self._observe is not None and is_counted:
            with self._no_grad:
                self._observe(outputs, targets)
        return loss

    def _update(self, factor: float, n_micro: int) -> None:
        """Unscale the gradients, make up for a short window, clip, step: clipping needs the true gradient."""
        optimizer, scaler = self._optimizer, self._scaler
        if self._accumulate > 1:
            self._state.setdefault("n_micro", n_micro)
        if scaler is not None and (factor != 1.0 or self._clip_norm is not None):
            scaler.unscale_(optimizer)
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], factor)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._run.doing = "update"
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def compute_loss(self, batch: Any, *, is_counted: bool = True) -> Tensor:
        """Compute the loss of one batch by itself: for evaluation, under ``torch.no_grad()``."""
        return self._forward(self.place(batch) if self._must_place else batch, is_counted=is_counted)

    def compute_outputs(self, batch: Any) -> Any:
        """Compute the outputs of one batch by itself: for inference, under ``torch.no_grad()``."""
        inputs, _ = self._prepare_batch(self.place(batch) if self._must_place else batch)
        with self._autocast:
            return self._run_model(inputs)

    def place(self, batch: Any) -> Any:
        """Put the tensors of a nested batch onto the device, 4-d ones in the run's memory format."""
        return map_tensors(self._place_tensor, batch)

    def _place_tensor(self, tensor: Tensor) -> Tensor:
        if self._on_gpu:
            tensor = tensor.to(self._device, non_blocking=self._non_blocking)
        if self._memory_format is not None and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=self._memory_format)
        return tensor

    def _run_model(self, inputs: Any) -> Any:
        return self._model_forward(*inputs) if isinstance(inputs, SEQUENCES) else self._model_forward(inputs)

    def _prepare_batch(self, batch: Any) -> tuple[Any, Any]:
        """Make (inputs, targets) of a batch on the device."""
        if self.transform is not None:
            batch = self.transform(batch, self._generator)
        if self._prepare is not None:
            batch = self._prepare(batch, self._generator)
        if not self._has_looked and isinstance(batch, Mapping):  # two keys would pass for inputs and targets
            raise DataError(_describe_bad_batch(batch))
        try:
            inputs, targets = batch
        except (TypeError, ValueError):
            raise DataError(_describe_bad_batch(batch)) from None
        if not self._has_looked:
            _look_at_inputs(inputs)
        return inputs, targets

    def _look_at_batch(self, batch: Any, n: int) -> None:
        """Note what levers read back of the first batch (``Lever.observe``)."""
        self._state["batch_size"] = n
        first = find_tensor(batch)
        if self._on_gpu and first is not None and first.device.type == "cpu":  # else it was copied ahead
            self._state["pinned"] = first.is_pinned()

    def _compute_loss(self, outputs: Any, targets: Any, inputs: Any) -> Tensor:
        if self._has_looked:
            return self._loss(outputs, targets)
        with warnings.catch_warnings():  # of targets that are broadcast: the loss would mean something else
            warnings.filterwarnings("error", message="Using a target size")
            loss = self._loss(outputs, targets)
        self._look_at_loss(loss, inputs)
        return loss

    def _look_at_loss(self, loss: Any, inputs: Any) -> None:
        self._has_looked = True
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"the loss returned {what}; it must return a scalar tensor, the mean over the batch")
        if not loss.is_floating_point():
            raise UsageError(f"the loss is a number of {loss.dtype}; it must be a real floating-point number")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                "the loss does not depend on the model's parameters; compute it from the model's outputs, without "
                ".detach(), .item(), argmax or torch.no_grad() on the way"
            )
        device = self._device.type
        is_on = torch.is_autocast_enabled(device)
        self._state["autocast_dtype"] = torch.get_autocast_dtype(device) if is_on else None
        first = find_tensor(inputs)
        if first is not None and first.dim() == 4:
            self._state["input_channels_last"] = first.is_contiguous(memory_format=torch.channels_last)


def _fetch(batches: Iterator[Any]) -> Any:
    try:
        return next(batches, _END)
    except Exception as error:  # the boundary to the data workers' processes: say what happened there
        explained = explain_loader_error(error)
        if explained is None or explained is error:
            raise
        raise explained from error


def fetch_batches(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the rest of ``batches``; a data worker that dies is a WorkerDiedError here too."""
    while (batch := _fetch(batches)) is not _END:
        yield batch


def _look_at_inputs(inputs: Any) -> None:
    """Refuse the inputs of a first batch with which no model could be called."""
    first = find_tensor(inputs)
    if first is not None and not any(tensor.numel() for tensor in list_tensors(inputs)):
        raise DataError(
            f"the inputs of a batch are empty: a tensor of shape {tuple(first.shape)}; mend the dataset, its collate, "
            "or the workload's prepare"
        )
    if isinstance(inputs, SEQUENCES) and inputs and all(isinstance(text, str) for text in inputs):
        raise DataError(
            f"the inputs of a batch are {len(inputs)} texts; turn them into tensors of numbers in the dataset, its "
            "collate, or the workload's prepare"
        )


def _describe_bad_batch(batch: Any) -> str:
    what = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
    return f"a batch is {what}, expected (inputs, targets); change the dataset, its collate, or the workload's prepare"
