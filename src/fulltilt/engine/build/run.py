"""A training run, built and ready for the loop, the probes and the trials."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fulltilt.config import Config
from fulltilt.data import BatchTransform
from fulltilt.data.loading.worker_signals import end_workers
from fulltilt.engine.ranks.parallel import DealtBatches, GradientSync, list_sizes
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.engine.step.average import WeightAverage
from fulltilt.engine.step.data_waits import DataWaits
from fulltilt.engine.step.prefetch import CudaLane, Prefetcher
from fulltilt.engine.step.train_step import Doing
from fulltilt.errors import DataError
from fulltilt.levers import Facts, Setup
from fulltilt.measure.nested import find_tensor
from fulltilt.records import Plan
from fulltilt.tasks import Workload


@dataclasses.dataclass(kw_only=True)
class Run:
    """A training run, built and ready. ``close`` ends its data workers."""

    config: Config
    plan: Plan
    workload: Workload
    setup: Setup  # model, forward, optimizer, scaler and loader as the levers left them
    facts: Facts
    device: torch.device
    dataset: Any
    n_samples: int | None  # of the training set; None when it streams
    batch_size: int
    seed: int
    clip_norm: float | None
    generator: torch.Generator  # on the device, for ``workload.prepare``
    loader_generator: torch.Generator  # on the CPU, seeds the data workers
    notes: list[str]  # what the user should know of the plan as it was built
    steps_per_epoch: int | None = None  # optimizer steps, a short last window included; None when the data streams
    transform: BatchTransform | None = None  # applied to a batch before ``workload.prepare``
    lane: CudaLane | None = None  # copies batches ahead of the step; None: the step copies them itself
    average: WeightAverage | None = None  # kept up after every optimizer step; evaluation takes it
    world: World = ALONE
    sync: GradientSync | None = None  # told before each micro-step whether it joins gradients; None with one rank
    data_waits: DataWaits | None = None
    doing: Doing = "elsewhere"  # what runs now, for whoever handles an error of it
    _iterators: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)

    @property
    def loader(self) -> DataLoader:
        return self.setup.loader

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds only a part of the weights."""
        return self.sync is not None and self.sync.is_sharded

    def start_epoch(self, epoch: int, start_index: int = 0) -> Iterator[Any]:
        """Start the batches of one epoch, from its sample number ``start_index`` on.

        Cost: starts the data workers unless they persist.
        """
        for source in (self.loader.sampler, self.dataset):
            if hasattr(source, "set_epoch"):
                source.set_epoch(epoch, start_index) if start_index else source.set_epoch(epoch)
                break
        if start_index == 0:
            for hook in self.setup.epoch_hooks:
                hook(epoch)
        return self.deal(self.loader, self.lane)

    def deal(self, loader: DataLoader, lane: CudaLane | None = None) -> Iterator[Any]:
        """Start one pass over ``loader``, copied ahead on ``lane``; a rank gets its parts (``DealtBatches``)."""
        batches: Iterator[Any] = iter(loader)
        self._iterators.add(batches)
        if self.data_waits is not None and loader is self.loader:
            batches = self.data_waits.count(batches)
        if lane is not None:
            batches = Prefetcher(batches, lane, self._look_at_host_batch)
        if not self.world.is_divided:
            return batches
        sizes = None
        if not isinstance(loader.dataset, IterableDataset):
            assert loader.batch_size is not None
            n_samples = len(loader.sampler)  # type: ignore[arg-type]
            sizes = list_sizes(n_samples, loader.batch_size, drop_last=loader.drop_last)
        return DealtBatches(batches, self.world, sizes)

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Give whole batches, as one process alone would get, to what is started inside the block."""
        world, share = self.world, getattr(self.loader, "share", None)
        self.world, self.loader.share = World(link=world.link), None  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.world, self.loader.share = world, share  # type: ignore[attr-defined]

    def _look_at_host_batch(self, batch: Any) -> None:
        """Note what the step could not see any more of a batch that was copied ahead (``Lever.observe``)."""
        state = self.setup.state
        state["n_prefetched"] = state.get("n_prefetched", 0) + 1
        if "pinned" not in state and (first := find_tensor(batch)) is not None:
            state["pinned"] = first.is_pinned()

    def build_empty_error(self, epoch: int) -> DataError:
        """Build the error of an epoch, counted from 1, that had no batch."""
        remedy = "must yield samples anew each time it is iterated over" if epoch > 1 else "needs one batch at least"
        return DataError(f"the training set of {self.workload.name} yielded no batch in epoch {epoch}; it {remedy}")

    def close(self) -> None:
        """End data workers that are still alive; persistent ones cannot serve another epoch after."""
        for batches in list(self._iterators):
            end_workers(batches)
        self._iterators.clear()

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        for hook in self.setup.exit_hooks:
            hook()
