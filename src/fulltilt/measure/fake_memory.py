"""Estimate the peak device memory of a training step from fake tensors, which have a shape and no data.

The step of a built run is taken on fake copies of its model and optimizer. A ledger holds every storage that an
operator returns, once, from its first tensor to its last reference; its peak is what the allocator would have to hold.

The ledger cannot see, so real probes correct an estimate and what is recommended was run:

- **Scratch inside operators**: torch's convolutions on a CPU hold up to two more copies of their output, which made the
  real peak of a three-layer network a third larger, that of residual networks 0 to 5 %; without convolutions it was
  below 0.1 % (``benchmarks/results/memory_prediction-cpu.json``). cuDNN takes workspaces.
- **The allocator's segments**: CUDA's caching allocator takes segments of 2 or 20 MiB and keeps what it cannot use.
- **What is there besides tensors**: the context of CUDA, interpreter and libraries. A constant, which one probe gives.
"""

import copy
import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulltilt.errors import DataError, FakeRunError
from fulltilt.measure.nested import find_tensor, map_tensors
from fulltilt.measure.phase_timer import NullTimer

ALLOCATION_BYTES: Mapping[str, int] = {"cuda": 512, "cpu": 64}
"""What an allocation is rounded up to: CUDA's caching allocator; the alignment of torch's allocator on a CPU."""

N_STEPS = 2  # the first creates the optimizer's state, the second holds it from the start
_MAX_MICRO = 2  # of an accumulation window: from the second on gradients are there already

Kind = Literal["parameters", "gradients", "optimizer", "batch", "activations"]
_UNSUPPORTED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedMutationAliasingException,
    fake_tensor.UnsupportedOperatorException,
)
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FakePeak:
    """Live bytes at the fullest moment of two training steps and one evaluation step. The parts add up."""

    batch_size: int
    total_bytes: int
    parameters_bytes: int  # buffers and other tensors of model and loss too
    gradients_bytes: int
    optimizer_bytes: int
    batch_bytes: int
    activations_bytes: int  # saved for the backward pass, and temporaries
    persistent_bytes: int  # parameters and optimizer state, which stay from the second step on

    @property
    def total_gib(self) -> float:
        return self.total_bytes / 2**30


def estimate_memory(
    run: Any,
    batch_size: int,
    *,
    batch: Any,
    build_step: Callable[[Any], Any],
    imitate: str | None = None,
    evaluation_batch_size: int | None = None,
) -> FakePeak:
    """Estimate the peak device memory of ``run`` with another batch size.

    Precision, memory format, accumulation, clipping, checkpointing and the fused optimizer are those of the run.
    A compiled run is estimated in eager mode: what its compiler fuses away is counted. Layers that take other
    operators on a GPU (recurrent ones, attention) are estimated by those of the device of the run.

    Args:
        run: A built run (``engine.Run``); it stays as it is, and so does the state of random number generators.
        batch: A real batch as the loader yields it; only its shapes and types are used. Tensors with as many rows as
            its first one are stretched to ``batch_size``.
        build_step: ``engine.TrainStep``.
        imitate: ``cuda`` follows a GPU's rounding and optimizer defaults on a machine without one; the run's own
            device when None.
        evaluation_batch_size: ``batch_size`` when None.

    Raises:
        FakeRunError: the model, loss or ``prepare`` needs the data itself, or has an operator without a shape rule.
        DataError: the batch holds no tensor.

    **Device**: nothing is computed or allocated on it. Cost: grows with the number of operators, not with the
    batch; seconds for each case stand in ``benchmarks/results/memory_prediction-cpu.json``.
    """
    kind = imitate or run.device.type
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = _StorageLedger(run.device.type, ALLOCATION_BYTES.get(kind, 1))
    try:
        fake = _copy_as_fake(run, mode, ledger)
        _prefer_foreach(fake.setup.optimizer, on_gpu=kind == "cuda")
        for parameter in fake.setup.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(ledger.mark_gradient)
        with mode, ledger:
            fake = dataclasses.replace(fake, batch_size=batch_size)
            _take_steps(fake, batch, build_step, ledger, evaluation_batch_size or batch_size)
    except _UNSUPPORTED as error:
        func = getattr(error, "func", None) or next((a for a in error.args if isinstance(a, torch._ops.OpOverload)), "")
        raise FakeRunError(
            f"the step cannot be taken on fake tensors: {func or error} needs the data itself; real probes measure its "
            "memory",
            operator=str(func) or None,
        ) from error
    except _FAILURES as error:  # a user's code that meets a tensor without data may fail in any of these ways
        raise FakeRunError(
            f"the step cannot be taken on fake tensors ({type(error).__name__}: {error}); real probes measure its "
            "memory"
        ) from error
    return ledger.build_peak(batch_size)


def _take_steps(
    fake: Any, batch: Any, build_step: Callable[[Any], Any], ledger: "_StorageLedger", evaluation_batch_size: int
) -> None:
    step = build_step(fake)
    n_micro = fake.setup.accumulate  # a window that is one batch holds inputs and outputs of all of it
    if not fake.workload.couples_samples:
        n_micro = min(n_micro, _MAX_MICRO)
    for _ in range(N_STEPS):
        step(_yield_batches(batch, fake.batch_size, n_micro, ledger), NullTimer())
        ledger.mark(_find_state(fake.setup.optimizer), "optimizer")
    fake.setup.model.eval()
    with torch.no_grad():
        step.compute_loss(next(_yield_batches(batch, evaluation_batch_size, 1, ledger)))


class _Entry(NamedTuple):
    """A storage in the ledger."""

    reference: Any  # weak, kept for its callback
    n_bytes: int
    kind: Kind
    number: int  # how many were entered before it, and it


class _Peak(NamedTuple):
    """The fullest moment of the ledger so far."""

    total: int
    number: int  # of the entry that made it
    split: Counter[Kind]


class _StorageLedger(TorchDispatchMode):
    """Counts live bytes by kind, from what every operator returns, and keeps the split at the fullest moment."""

    def __init__(self, device_type: str, granularity: int):
        super().__init__()
        self._device_type, self._granularity = device_type, granularity
        self._entries: dict[int, _Entry] = {}  # by address of the storage, which is its own while it lives
        self._n_entered = 0
        self._live: Counter[Kind] = Counter()
        self._total = 0
        self._peak = _Peak(0, 0, Counter())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        kind: Kind = "batch" if self._is_placed_batch(func, args) else "activations"
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, Tensor):
                self.enter(tensor, kind)
        return outputs

    def _is_placed_batch(self, func: Any, args: Any) -> bool:
        """A copy onto the device, which nothing else in a step is, or the batch in another memory format."""
        if func is torch.ops.aten._to_copy.default:
            return args[0].device.type != self._device_type
        if func is not torch.ops.aten.clone.default:
            return False
        entry = self._entries.get(args[0].untyped_storage()._cdata)
        return entry is not None and entry.kind == "batch"

    def enter(self, tensor: Tensor, kind: Kind) -> None:
        """Count the tensor's storage from now until nothing refers to it; one that is known stays as it is."""
        if tensor.device.type != self._device_type or tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._entries:
            return
        n_bytes = -(-storage.nbytes() // self._granularity) * self._granularity
        self._n_entered += 1
        self._entries[key] = _Entry(weakref.ref(storage, lambda _: self._leave(key)), n_bytes, kind, self._n_entered)
        self._live[kind] += n_bytes
        self._total += n_bytes
        if self._total > self._peak.total:
            self._peak = _Peak(self._total, self._n_entered, self._live.copy())

    def mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.mark([parameter.grad], "gradients")

    def mark(self, tensors: list[Tensor], kind: Kind) -> None:
        """Give storages that were entered as activations their true kind, also in the split of a past peak."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            entry = self._entries.get(key)
            if entry is None or entry.kind != "activations":
                continue
            self._entries[key] = entry._replace(kind=kind)
            splits = [self._live, *([self._peak.split] if entry.number <= self._peak.number else [])]
            for split in splits:
                split[entry.kind] -= entry.n_bytes
                split[kind] += entry.n_bytes

    def build_peak(self, batch_size: int) -> FakePeak:
        split = self._peak.split
        return FakePeak(
            batch_size=batch_size,
            total_bytes=self._peak.total,
            **{f"{kind}_bytes": split[kind] for kind in get_args(Kind)},
            persistent_bytes=self._live["parameters"] + self._live["optimizer"],
        )

    def _leave(self, key: int) -> None:
        entry = self._entries.pop(key)
        self._live[entry.kind] -= entry.n_bytes
        self._total -= entry.n_bytes


def _copy_as_fake(run: Any, mode: FakeTensorMode, ledger: _StorageLedger) -> Any:
    """Copy a run with fake model, optimizer, loss and prepare; real tensors they hold are entered as parameters."""
    setup, workload = run.setup, run.workload
    memo: dict[int, Any] = {}
    with FakeCopyMode(mode):
        model, optimizer, loss, prepare, average = copy.deepcopy(
            (setup.model, setup.optimizer, workload.loss, workload.prepare, run.average), memo
        )
    for name, value in vars(setup.optimizer).items():  # torch.optim drops its own switches when it is copied
        if name not in vars(optimizer) and isinstance(value, bool):
            setattr(optimizer, name, value)
    optimizer.zero_grad(set_to_none=True)
    _renew_counts(setup.optimizer, optimizer, mode)
    copies = [value for value in memo.values() if isinstance(value, FakeTensor)]
    kept = {id(tensor) for tensor in _find_state(optimizer)}
    for tensor in copies:
        ledger.enter(tensor, "optimizer" if id(tensor) in kept else "parameters")
    fake_setup = dataclasses.replace(
        setup,
        model=model,
        forward=model,
        optimizer=optimizer,
        scaler=None if setup.scaler is None else _BlindScaler(setup.device.type),
        state={},
    )
    return dataclasses.replace(
        run,
        setup=fake_setup,
        workload=dataclasses.replace(workload, loss=loss, prepare=prepare),
        average=average,
        generator=torch.Generator(run.device),
    )


def _renew_counts(real: torch.optim.Optimizer, fake: torch.optim.Optimizer, mode: FakeTensorMode) -> None:
    """Make the optimizer's step counts on the host anew under ``mode``: copied ones have no value to read."""
    for real_state, fake_state in zip(real.state.values(), fake.state.values(), strict=True):
        for name, value in real_state.items():
            if isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu":
                count = value.item()
                with mode:
                    fake_state[name] = torch.tensor(count, dtype=value.dtype)


class _BlindScaler(torch.amp.GradScaler):
    """Steps without reading whether a gradient overflowed: a fake tensor has no value to read."""

    def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)


def _prefer_foreach(optimizer: torch.optim.Optimizer, *, on_gpu: bool) -> None:
    """Let the optimizer update all parameters at once, as on a GPU, with temporaries as large as all of them.

    torch.optim decides so by the parameters' class, which is another one here.
    """
    for group in optimizer.param_groups if on_gpu else ():
        if group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True


def _find_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in tree_leaves(state) if isinstance(value, Tensor)]


def _yield_batches(batch: Any, batch_size: int, n: int, ledger: _StorageLedger) -> Iterator[Any]:
    """Yield ``n`` fake batches of ``batch_size`` rows, without keeping a reference, as a loader does."""
    first = find_tensor(batch)
    if first is None:
        raise DataError(f"the batch ({type(batch).__name__}) holds no tensor with rows; its memory cannot be estimated")

    def stretch(tensor: Tensor) -> Tensor:
        rows = (batch_size,) if tensor.dim() and tensor.shape[0] == first.shape[0] else tensor.shape[:1]
        made = torch.empty((*rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
        ledger.mark([made], "batch")
        return made

    for _ in range(n):
        yield map_tensors(stretch, batch)
