"""One optimizer step over a window whose loss compares all of its samples: gradient caching.

Micro-batches of such a loss do not add up to the large batch. Here they are one batch, at the memory of a micro-batch:

    1. every micro-batch forward without gradients: its outputs are kept, its activations are not
    2. the loss over all outputs of the window, and its gradient by each output
    3. every micro-batch forward once more, and backward from its share of that gradient

The gradient is that of the large batch: the chain rule, cut at the outputs. The second forward sees what the first saw:
the same views (kept from step 1), the same random draws (generators rewound), the same buffers (put back). What the
model computes over a batch by itself, as BatchNorm does, it computes over the micro-batch.

Source: Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (arXiv 2101.06983).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fulltilt.engine.step.train_step import StepOutcome, StepParts, Timer, TrainStep
from fulltilt.errors import UsageError

REPLAY_TOLERANCE = 0.05  # rounding of half precision stays below it, another dropout mask does not


def build_step(
    run: StepParts,
    *,
    observe: Callable[[Any, Any], None] | None = None,
    forward: Callable[..., Any] | None = None,
) -> TrainStep:
    """The step that suits the run: a window of a workload that couples its samples is one batch."""
    kind = CachedStep if run.workload.couples_samples and run.setup.accumulate > 1 else TrainStep
    return kind(run, observe=observe, forward=forward)


class CachedStep(TrainStep):
    """``TrainStep`` for losses that compare samples with each other; called in the same way.

    Outputs, and targets, of the window are those of its micro-batches joined along the first dimension, so the loss
    must read them in any such order (``tasks.nt_xent``). ``observe`` gets the window's.

    Device: enqueues work; synchronises in the first step only, to see that the second forward gave what the first did.
    Memory: activations of one micro-batch; inputs and outputs of the window. Cost: one more forward than ``TrainStep``,
    without gradients.
    """

    def __init__(
        self,
        run: StepParts,
        *,
        observe: Callable[[Any, Any], None] | None = None,
        forward: Callable[..., Any] | None = None,
    ):
        super().__init__(run, observe=observe, forward=forward)
        self._model = run.setup.model
        self._has_replayed = False

    def __call__(self, batches: Iterator[Any], timer: Timer) -> StepOutcome | None:
        """Run one step; ``None`` when ``batches`` was at its end already.

        Raises:
            WorkerDiedError: a data worker died.
            DataError: a batch is not (inputs, targets).
            UsageError: outputs or targets of micro-batches cannot be joined, or the model gives other outputs the
                second time.
        """
        lap = timer.lap
        self._run.doing = "step"
        buffers = _copy_buffers(self._model)
        micros, n_samples = self._run_first_pass(batches, lap)
        if not micros:
            self._run.doing = "elsewhere"
            return None
        _restore_buffers(self._model, buffers)
        loss, gradients = self._compute_output_gradients(micros, lap)
        after = _read_draws(self._device)
        for micro, gradient in zip(micros, gradients, strict=True):
            _rewind_draws(micro.draws, self._device)
            with self._autocast:
                outputs = self._run_model(micro.inputs)
            if not self._has_replayed:
                self._has_replayed = True
                _check_replay(micro.outputs, outputs)
            leaves = _list_leaves(outputs)
            lap("forward")
            torch.autograd.backward(*_select_pairs(leaves, gradient))
            lap("backward")
        _rewind_draws(after, self._device)
        self._update(1.0, len(micros))
        lap("optimizer")
        self._run.doing = "elsewhere"
        return StepOutcome(loss, n_samples, len(micros))

    def _run_first_pass(self, batches: Iterator[Any], lap: Callable[[str], None]) -> tuple[list[_Micro], int]:
        micros: list[_Micro] = []
        n_samples = 0
        while len(micros) < self._accumulate:
            micro = self._next_micro(batches, lap, is_last=len(micros) + 1 == self._accumulate)
            if micro is None:
                break
            inputs, targets = self._prepare_batch(micro.batch)
            draws = _read_draws(self._device)
            with torch.no_grad(), self._autocast:
                outputs = self._run_model(inputs)
            micros.append(_Micro(inputs, targets, outputs, draws))
            n_samples += micro.n_samples
            lap("forward")
        return micros, n_samples

    def _compute_output_gradients(
        self, micros: list[_Micro], lap: Callable[[str], None]
    ) -> tuple[Tensor, list[list[Tensor | None]]]:
        """The loss of the window, and for each micro-batch the gradient of it (scaled, where there is a scaler)."""
        cached = [pytree.tree_map(_make_leaf, micro.outputs) for micro in micros]
        outputs = _join(cached, "outputs")
        targets = _join([micro.targets for micro in micros], "targets")
        with self._autocast:
            loss = self._loss(outputs, targets)
            if not self._has_looked:
                self._look_at_loss(loss, micros[0].inputs)
        if self._observe is not None:
            with torch.no_grad():
                self._observe(outputs, targets)
        lap("forward")
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        gradients = [[leaf.grad for leaf in _list_leaves(part)] for part in cached]
        lap("backward")
        return loss.detach(), gradients


def _check_replay(first: Any, second: Any) -> None:
    """The gradient is the window's only if the second forward gives what the loss has seen.

    Raises:
        UsageError: it does not: the model draws where nothing can be rewound.
    """
    for a, b in zip(_list_leaves(first), _list_leaves(second), strict=True):
        if isinstance(a, FakeTensor) or not a.is_floating_point():
            continue
        gap = (a.detach().float() - b.detach().float()).norm() / a.detach().float().norm().clamp(min=1e-12)
        if not gap <= REPLAY_TOLERANCE and a.isfinite().all():
            raise UsageError(
                f"the model gave other outputs for the same inputs the second time (they differ by {float(gap):.1%}), "
                "so that gradient caching would give a wrong gradient: it draws random numbers from a generator of its "
                "own, or compiled code does; leave dropout out, use compile false, or accumulate 1"
            )


class _Draws(NamedTuple):
    """Where the random generators stood that a model may draw from."""

    torch_cpu: Tensor
    torch_device: Tensor | None
    numpy: Any
    python: Any


class _Micro(NamedTuple):
    inputs: Any
    targets: Any
    outputs: Any
    draws: _Draws  # before its forward


def _read_draws(device: torch.device) -> _Draws:
    """Device: the state of a GPU's generator lies on the host; nothing is waited for."""
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return _Draws(torch.get_rng_state(), on_device, np.random.get_state(), random.getstate())


def _rewind_draws(draws: _Draws, device: torch.device) -> None:
    torch.set_rng_state(draws.torch_cpu)
    if draws.torch_device is not None:
        torch.cuda.set_rng_state(draws.torch_device, device)
    np.random.set_state(draws.numpy)
    random.setstate(draws.python)


def _copy_buffers(model: torch.nn.Module) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in model.buffers()]


@torch.no_grad()
def _restore_buffers(model: torch.nn.Module, saved: Sequence[Tensor]) -> None:
    """So that running statistics move once a step, and a state that a forward reads is the same in both."""
    buffers = list(model.buffers())
    if buffers:
        torch._foreach_copy_(buffers, list(saved))


def _make_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point())


def _list_leaves(outputs: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


def _select_pairs(outputs: list[Tensor], gradients: list[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs that the loss depends on, with their gradients."""
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _join(parts: list[Any], what: str) -> Any:
    """Nested tensors of the micro-batches as those of the window."""
    flat = [pytree.tree_flatten(part) for part in parts]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise UsageError(f"the {what} of two micro-batches of one window are nested differently; make them alike")
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_join_column(column, what) for column in columns], spec)


def _join_column(column: tuple[Any, ...], what: str) -> Any:
    first = column[0]
    if not isinstance(first, Tensor):
        return first
    if not first.dim():
        raise UsageError(
            f"the {what} hold a tensor without a batch dimension: those of several micro-batches cannot be joined; "
            "return one row a sample, or use accumulate 1"
        )
    return torch.cat(column)
