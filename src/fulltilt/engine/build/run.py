"""A training run, built and ready: what the loop, the probes and the trials are handed."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from fulltilt.data import BatchTransform
from fulltilt.data.loading.worker_signals import end_workers
from fulltilt.engine.ranks.parallel import DealtBatches, GradientSync, list_sizes
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.engine.step.average import WeightAverage
from fulltilt.engine.step.data_waits import DataWaits
from fulltilt.engine.step.prefetch import CopyLane, Prefetcher
from fulltilt.engine.step.train_step import Doing
from fulltilt.levers import Facts, Setup
from fulltilt.measure.nested import find_tensor
from fulltilt.records import Plan
from fulltilt.tasks import Workload

if TYPE_CHECKING:
    from fulltilt.config import Config


@dataclasses.dataclass(kw_only=True)
class Run:
    """A training run, built and ready. ``close`` ends its data workers.

    Attributes:
        setup: Model, forward, optimizer, scaler and loader as the levers left them.
        n_samples: Length of the training set, None when it streams.
        steps_per_epoch: Optimizer steps, a short last window included; None when the data streams.
        average: Of the weights, kept up after every optimizer step; evaluation takes it.
        generator: On the device; the randomness of ``workload.prepare``.
        loader_generator: On the CPU; seeds the data workers.
        notes: What the user should know of the plan as it was built.
        world: The other processes of the run.
        sync: Told before each micro-step whether gradients are joined in it; None with one rank.
        transform: What the step does to a batch before ``workload.prepare``; None: nothing.
        lane: Where batches are copied ahead of the step; None: the step copies them itself.
        data_waits: Counts how long batches are waited for; None: nobody asks.
        doing: What runs now, for whoever handles an error of it.
    """

    config: Config | None
    plan: Plan
    workload: Workload
    setup: Setup
    facts: Facts
    device: torch.device
    dataset: Any
    loader: DataLoader
    n_samples: int | None
    batch_size: int
    steps_per_epoch: int | None
    seed: int
    clip_norm: float | None
    generator: torch.Generator
    loader_generator: torch.Generator
    notes: list[str]
    transform: BatchTransform | None = None
    lane: CopyLane | None = None
    average: WeightAverage | None = None
    world: World = ALONE
    sync: GradientSync | None = None
    data_waits: DataWaits | None = None
    doing: Doing = "elsewhere"
    _iterators: weakref.WeakSet[Any] = dataclasses.field(default_factory=weakref.WeakSet)

    @property
    def is_sharded(self) -> bool:
        """Whether each rank holds a part of the weights only."""
        return self.sync is not None and self.sync.is_sharded

    def start_epoch(self, epoch: int, start_index: int = 0) -> Iterator[Any]:
        """Batches of one epoch, from its sample number ``start_index`` on.

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

    def deal(self, loader: DataLoader, lane: CopyLane | None = None) -> Iterator[Any]:
        """Make one pass over ``loader``, copied ahead on ``lane``; a rank gets its parts (``DealtBatches``)."""
        batches: Iterator[Any] = iter(loader)
        self._iterators.add(batches)
        if self.data_waits is not None and loader is self.loader:
            batches = self.data_waits.count(batches)
        if lane is not None:
            batches = Prefetcher(batches, lane, self._look_at_host_batch)
        return batches if not self.world.is_divided else self._deal_parts(loader, batches)

    def _deal_parts(self, loader: DataLoader, batches: Iterator[Any]) -> Iterator[Any]:
        if isinstance(loader.dataset, IterableDataset):
            return DealtBatches(batches, self.world, None)
        assert loader.batch_size is not None
        sizes = list_sizes(len(loader.sampler), loader.batch_size, drop_last=loader.drop_last)  # type: ignore[arg-type]
        return DealtBatches(batches, self.world, sizes)

    @contextlib.contextmanager
    def undivided(self) -> Iterator[None]:
        """Whole batches, as one process alone would get them, from what is started in here."""
        world, share = self.world, getattr(self.loader, "share", None)
        self.world, self.loader.share = World(link=world.link), None  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.world, self.loader.share = world, share  # type: ignore[attr-defined]

    def _look_at_host_batch(self, batch: Any) -> None:
        """What the step would see of it, were it not copied before: ``Lever.observe``."""
        state = self.setup.state
        state["n_prefetched"] = state.get("n_prefetched", 0) + 1
        if "pinned" not in state and (first := find_tensor(batch)) is not None:
            state["pinned"] = first.is_pinned()

    def close(self) -> None:
        """End data workers that are still alive. The run cannot start another epoch with persistent workers after."""
        for batches in list(self._iterators):
            end_workers(batches)
        self._iterators.clear()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
