"""Gradient caching: one optimizer step over a window whose loss compares all of its samples.

It computes the gradient of the large batch at the memory of a micro-batch, by the chain rule cut at the outputs:

    1. run every micro-batch forward without gradients: outputs are kept, activations are not
    2. compute the loss over all outputs of the window, and its gradient by each output
    3. run every micro-batch forward once more, and backward from its share of that gradient

The second forward sees what the first saw: the same views, the same random draws (generators are rewound), the same
buffers (put back). What a model computes over a batch, as BatchNorm does, it computes over the micro-batch.

Source: Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup (arXiv 2101.06983).
"""

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from fulltilt.engine.step.train_step import StepOutcome, StepParts, Timer, TrainStep
from fulltilt.errors import UsageError

REPLAY_TOLERANCE = 0.05  # rounding of half precision stays below it, another dropout mask does not


def build_step(run: StepParts, *, observe: Callable[[Any, Any], None] | None = None) -> TrainStep:
    """Build the step that suits the run: where a workload couples its samples, a window is one batch."""
    kind = CachedStep if run.workload.couples_samples and run.setup.accumulate > 1 else TrainStep
    return kind(run, observe=observe)


class CachedStep(TrainStep):
    """``TrainStep`` for losses that compare samples with each other; called in the same way.

    Outputs and targets of the window are those of its micro-batches joined along the first dimension, so the loss must
    read them in any such order (``tasks.losses``). ``observe`` gets the window's.

    Device: enqueues work; synchronises in the first step only, to check that both forwards agree.
    Memory: activations of one micro-batch; inputs and outputs of the window.
    Cost: one more forward than ``TrainStep``, without gradients.
    """

    _has_replayed = False

    def __call__(self, batches: Iterator[Any], timer: Timer) -> StepOutcome | None:
        """Run one step; return None when ``batches`` was at its end already.

        Raises:
            WorkerDiedError: a data worker died.
            DataError: a batch is not (inputs, targets).
            UsageError: outputs or targets of micro-batches cannot be joined, or the model gives other outputs the
                second time.
        """
        lap = timer.lap
        self._run.doing = "step"
        buffers = list(self._run.setup.model.buffers())
        saved = [buffer.detach().clone() for buffer in buffers]
        micros, n_samples = self._run_first_pass(batches, lap)
        if not micros:
            self._run.doing = "elsewhere"
            return None
        if buffers:  # running statistics move once a step, and both forwards read the same state
            with torch.no_grad():
                torch._foreach_copy_(buffers, saved)
        loss, gradients = self._compute_output_gradients(micros, lap)
        after = _read_draws(self._device)
        for micro, gradient in zip(micros, gradients, strict=True):
            _rewind_draws(micro.draws, self._device)
            with self._autocast:
                outputs = self._run_model(micro.inputs)
            if not self._has_replayed:
                self._has_replayed = True
                _check_replay(micro.outputs, outputs)
            pairs = [
                (leaf, slope)
                for leaf, slope in zip(_list_leaves(outputs), gradient, strict=True)
                if slope is not None and leaf.requires_grad
            ]
            lap("forward")
            torch.autograd.backward([leaf for leaf, _ in pairs], [slope for _, slope in pairs])
            lap("backward")
        _rewind_draws(after, self._device)
        self._update(1.0, len(micros))
        lap("optimizer")
        self._run.doing = "elsewhere"
        return StepOutcome(loss, n_samples, len(micros))

    def _run_first_pass(self, batches: Iterator[Any], lap: Callable[[str], None]) -> tuple[list["_Micro"], int]:
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
        self, micros: list["_Micro"], lap: Callable[[str], None]
    ) -> tuple[Tensor, list[list[Tensor | None]]]:
        """Compute the window's loss, and its gradient by the outputs of each micro-batch, scaled by a scaler."""
        cached = [pytree.tree_map_only(Tensor, _make_leaf, micro.outputs) for micro in micros]
        outputs = _join(cached, "outputs")
        targets = _join([micro.targets for micro in micros], "targets")
        with self._autocast:
            loss = self._compute_loss(outputs, targets, micros[0].inputs)
        if self._observe is not None:
            with torch.no_grad():
                self._observe(outputs, targets)
        lap("forward")
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        gradients = [[leaf.grad for leaf in _list_leaves(part)] for part in cached]
        lap("backward")
        return loss.detach(), gradients


def _check_replay(first: Any, second: Any) -> None:
    """Refuse a model whose second forward gave other outputs than those that the loss has seen."""
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


class _Micro(NamedTuple):
    inputs: Any
    targets: Any
    outputs: Any
    draws: tuple[Any, ...]  # where the random generators stood before its forward


def _read_draws(device: torch.device) -> tuple[Any, ...]:
    """Return where the generators stand that a model may draw from.

    Device: the state of a GPU's generator lies on the host; nothing is waited for.
    """
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device, np.random.get_state(), random.getstate()


def _rewind_draws(draws: tuple[Any, ...], device: torch.device) -> None:
    on_host, on_device, of_numpy, of_python = draws
    torch.set_rng_state(on_host)
    if on_device is not None:
        torch.cuda.set_rng_state(on_device, device)
    np.random.set_state(of_numpy)
    random.setstate(of_python)


def _list_leaves(outputs: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(outputs) if isinstance(value, Tensor)]


def _make_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _join(parts: list[Any], what: str) -> Any:
    """Join the nested tensors of the micro-batches to those of the window."""

    def join(first: Any, *others: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        if not first.dim():
            raise UsageError(
                f"the {what} hold a tensor without a batch dimension: those of several micro-batches cannot be joined; "
                "return one row a sample, or use accumulate 1"
            )
        return torch.cat((first, *others))

    spec = pytree.tree_structure(parts[0])
    if any(pytree.tree_structure(part) != spec for part in parts):
        raise UsageError(f"the {what} of two micro-batches of one window are nested differently; make them alike")
    return pytree.tree_map(join, *parts)
