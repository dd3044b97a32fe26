"""From a dataset to the loader the engine iterates: order, whole-batch reads, seeds, threads."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fulltilt.config.bad_samples import UNREADABLE
from fulltilt.data.batched import BatchedDataset
from fulltilt.data.collate import fast_collate, identity
from fulltilt.data.loading.bad_samples import BadSamples
from fulltilt.data.loading.block_sampler import BlockSampler
from fulltilt.data.loading.placement import place, plan_blocks
from fulltilt.data.loading.sampler import BatchOrder, EpochSampler, Share
from fulltilt.data.loading.worker_signals import GuardedLoader, guard_worker
from fulltilt.data.seeds import compute_seed
from fulltilt.data.transforms.batch_transform import detach_transform, find_transforms
from fulltilt.data.transforms.pipeline import Pipeline, Raw
from fulltilt.errors import DataError, FulltiltError, UsageError


def build_loader(
    dataset: Dataset,
    *,
    batch_size: int,
    shuffle: bool,
    drop_last: bool,
    generator: torch.Generator | None = None,
    options: Mapping[str, Any] | None = None,
    worker_options: Mapping[str, Any] | None = None,
    collate: Callable[[list], Any] | None = None,
    seed: int | None = None,
    skip_limit: int | None = None,
    share: Share | None = None,
) -> DataLoader:
    """Build a DataLoader over ``dataset``.

    A map-style dataset may offer ``get_batch(indices, generator=None) -> (inputs, targets)`` (``generator`` may be
    left out); a batch is then one call instead of one call per sample. ``loader.sampler`` is an ``EpochSampler`` for
    map-style datasets. ``loader.dataset.source`` is ``dataset``.

    Args:
        dataset: Map-style or iterable. An iterable one decides its order itself: ``shuffle`` is without effect.
        batch_size: Samples per batch.
        shuffle: A new order per epoch, see ``EpochSampler.set_epoch``.
        drop_last: Leave out the last batch when it is short.
        generator: Where torch draws the base seed of its workers from; its initial seed is the default of ``seed``.
        options: Further keywords of DataLoader: num_workers, pin_memory, persistent_workers, prefetch_factor; and
            ``placement`` with ``placement_device``: where the rows lie, see ``place``. ``loader.dataset.source`` is
            then the placed dataset. ``transforms`` "device" takes the pipeline out of a dataset that allows it;
            ``loader.transform`` is then what the step has to do, and None otherwise.
        worker_options: ``threads``: intra-op threads per worker, None leaves torch's one.
        collate: Samples to a batch; switches whole-batch reads off.
        seed: Of order and augmentation; torch's own initial seed when neither it nor ``generator`` is given.
        skip_limit: So many samples that cannot be read may be left out (``loader.dataset.bad_samples``); None: the
            first one is an error. A placement that reads all of them beforehand skips none.
        share: The part of every batch that is loaded here, of several processes; the whole when None. Iterable
            datasets are not divided: each process gets all they yield.

    Raises:
        DataError: The dataset is empty, or has no length and is not iterable.
        UsageError: ``batch_size`` or the number of workers is out of range.
    """
    options = dict(options or {})
    n_workers = options.get("num_workers", 0)
    if batch_size < 1 or n_workers < 0:
        raise UsageError(f"batch_size {batch_size} must be 1 or more, num_workers {n_workers} 0 or more")
    placement, device = options.pop("placement", "stream"), options.pop("placement_device", torch.device("cpu"))
    # With workers, torch's own thread pins.
    is_pinned = device.type == "cuda" and bool(options.get("pin_memory")) and not n_workers
    dataset = place(dataset, placement, device, is_pinned=is_pinned, wants_skip=skip_limit is not None)
    transform: Pipeline | None = None
    if options.pop("transforms", "loader") == "device" and find_transforms(dataset) == "pipeline":
        dataset, transform = detach_transform(dataset)
    common = {
        "batch_size": batch_size,
        "drop_last": drop_last,
        "generator": generator,
        "worker_init_fn": _WorkerStart((worker_options or {}).get("threads"), options.get("multiprocessing_context"))
        if n_workers
        else None,
        **options,
    }
    if isinstance(dataset, IterableDataset):
        if skip_limit is not None:
            raise DataError(
                f"data.on_bad_sample skip needs samples with a number, and {type(dataset).__name__} streams; use stop"
            )
        return _build_quietly(dataset, collate_fn=collate or fast_collate, **common)
    if seed is None:
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    sampler = _build_sampler(dataset, shuffle and placement == "block_shuffled", shuffle, seed, n_workers > 0)
    fetcher = BatchFetcher(dataset, seed=seed, epoch_cell=sampler.epoch_cell, whole_batches=collate is None)
    if skip_limit is not None:
        fetcher.bad_samples = BadSamples(dataset, len(fetcher), skip_limit, share=n_workers > 0)
    collate = collate or (identity if fetcher.has_whole_batches else fast_collate)
    loader = _build_quietly(fetcher, kind=IndexedLoader, sampler=sampler, collate_fn=collate, **common)
    assert isinstance(loader, IndexedLoader)
    loader.transform, loader.share = transform, share
    return loader


def _build_sampler(dataset: Any, in_blocks: bool, shuffle: bool, seed: int, share_epoch: bool) -> EpochSampler:
    if in_blocks:
        blocks = plan_blocks(dataset)
        return BlockSampler(blocks.edges, blocks.n_mixed, seed, share_epoch=share_epoch)
    return EpochSampler(_read_length(dataset), shuffle, seed, share_epoch=share_epoch)


def _build_quietly(dataset: Dataset, kind: type[DataLoader] = GuardedLoader, **options: Any) -> DataLoader:
    """Without torch's paragraph about more workers than cores: ``check`` says it in a line, ``tune`` measures it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return kind(dataset, **options)


class IndexedLoader(GuardedLoader):
    """Hands out batches of indices as arrays; a torch without this hook makes the same batches of Python numbers.

    Without workers batches are read right here. Torch's own iterator marks each of them for its profiler, whether or
    not one listens: 35 µs a batch, a fifth of what gathering 256 rows of 5 KB takes.

    Attributes:
        transform: What was taken out of the dataset, for the step to do.
    """

    transform: Pipeline | None = None

    share: Share | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        # The seed that torch would draw for its workers: what else is drawn stays the same whoever reads.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        return self._read_here(self._index_sampler)  # as it is now: the share may change before the first batch

    def _read_here(self, order: BatchOrder) -> Iterator[Any]:
        for indices in order:
            yield self.collate_fn(self.dataset.__getitems__(indices))  # type: ignore[attr-defined]

    @property
    def _index_sampler(self) -> BatchOrder:
        assert isinstance(self.sampler, EpochSampler)
        assert self.batch_size is not None
        return BatchOrder(self.sampler, self.batch_size, self.drop_last, self.share)


class BatchFetcher(Dataset):
    """Stands between DataLoader and a map-style dataset: one call and one seed per batch.

    Randomness is seeded per batch from (seed, epoch, first index of the batch): a ``get_batch`` that takes a
    ``generator`` gets one, and in a worker torch's, numpy's and Python's global generators are seeded as well. In the
    main process those belong to the training step and are left alone.

    Attributes:
        source: The dataset itself.
        has_whole_batches: ``__getitems__`` returns a batch, not a list of samples.
        bad_samples: Those left out because they cannot be read; None: the first one is an error.
    """

    bad_samples: BadSamples | None = None

    def __init__(self, source: Any, *, seed: int, epoch_cell: torch.Tensor, whole_batches: bool = True):
        self.source = source
        self.has_whole_batches = whole_batches and callable(getattr(source, "get_batch", None))
        self._seed, self._epoch_cell = seed, epoch_cell
        self._takes_generator = self.has_whole_batches and _takes_generator(source.get_batch)
        self._takes_arrays = isinstance(source, BatchedDataset)  # a user's own gets the list that torch would give it
        self._is_plain = self._takes_arrays and self.has_whole_batches and _draws_nothing(source)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]

    def __getitems__(self, indices: np.ndarray | list[int]) -> Any:
        if self.bad_samples is None:
            return self._read(indices, int(indices[0]))
        return self._read_skipping(np.asarray(indices), self.bad_samples)

    def _read_skipping(self, indices: np.ndarray, bad: BadSamples) -> Any:
        while True:
            chosen = bad.replace_in(indices)
            try:
                return self._read(chosen, int(indices[0]))
            except UNREADABLE as error:
                found = [index for index in dict.fromkeys(chosen.tolist()) if not self._can_read(index)]
                if not found:  # each can be read by itself: the batch is at fault, its shapes for instance
                    raise
                bad.add(found, error)

    def _can_read(self, index: int) -> bool:
        try:
            self._read(np.array([index]), index)
        except UNREADABLE:
            return False
        return True

    def _read(self, indices: np.ndarray | list[int], first: int) -> Any:
        """One batch; ``first`` is the sample that its seed is made of."""
        try:
            return self._read_seeded(indices, first)
        except StopIteration as error:  # it would end the epoch, without a word
            raise DataError(
                f"{type(self.source).__name__} raised StopIteration for a sample below its length "
                f"{len(self.source):,}; __getitem__ has to return a sample"
            ) from error

    def _read_seeded(self, indices: np.ndarray | list[int], first: int) -> Any:
        if self._is_plain:  # no transform that could draw
            return self.source.get_batch(indices)
        seed = compute_seed(self._seed, int(self._epoch_cell.item()), first)
        if isinstance(indices, np.ndarray) and not self._takes_arrays:
            indices = indices.tolist()
        if get_worker_info() is not None:
            _seed_process(seed)
        if self._takes_generator:
            return self.source.get_batch(indices, generator=torch.Generator().manual_seed(seed))
        if self.has_whole_batches:
            return self.source.get_batch(indices)
        if callable(getattr(self.source, "__getitems__", None)):
            return self.source.__getitems__(indices)
        return self._read_samples(indices)

    def _read_samples(self, indices: np.ndarray | list[int]) -> list[Any]:
        samples: list[Any] = []
        try:
            for index in indices:
                samples.append(self.source[index])  # noqa: PERF401: the error below has to know how far it came
        except FulltiltError:  # says what it is about
            raise
        except Exception as error:  # of the user's own code: raised again, with the sample's number
            error.add_note(f"sample {indices[len(samples)]} of {type(self.source).__name__} was being read")
            raise
        return samples


class _WorkerStart:
    """Runs once in each worker process."""

    def __init__(self, threads: int | None, context: Any):
        self.threads = threads
        name = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
        self._parent = None if name == "forkserver" else os.getpid()

    def __call__(self, worker_id: int) -> None:
        guard_worker(self._parent)
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def _seed_process(seed: int) -> None:
    # torch.manual_seed also queues a seed for devices and walks the stack for it: 97 µs against 1 µs.
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def _draws_nothing(source: Any) -> bool:
    transform = getattr(source, "transform", ...)
    return transform is None or (isinstance(transform, Raw) and not transform.sizing.steps)


def _takes_generator(get_batch: Callable) -> bool:
    return "generator" in inspect.signature(get_batch).parameters


def _read_length(dataset: Any) -> int:
    try:
        length = len(dataset)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length; give it __len__, or derive it from "
            f"torch.utils.data.IterableDataset when it streams"
        ) from None
    if length < 1:
        raise DataError(f"{type(dataset).__name__} holds 0 samples; at least 1 is needed")
    return length
