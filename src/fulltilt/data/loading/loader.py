"""Build the loader that the engine iterates: order, whole-batch reads, seeds, threads."""

import functools
import inspect
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fulltilt.config.bad_samples import SKIP_REMEDY, UNREADABLE
from fulltilt.data.batched import BatchedDataset, name_sample
from fulltilt.data.collate import fast_collate, identity
from fulltilt.data.loading.bad_samples import BadSamples
from fulltilt.data.loading.block_sampler import BlockSampler
from fulltilt.data.loading.loader_errors import READING
from fulltilt.data.loading.placement import place, plan_blocks
from fulltilt.data.loading.sampler import BatchOrder, EpochSampler, Share
from fulltilt.data.loading.worker_signals import GuardedLoader, guard_worker
from fulltilt.data.seeds import compute_seed
from fulltilt.data.transforms.batch_transform import detach_transform, find_transforms
from fulltilt.data.transforms.pipeline import Pipeline, Raw
from fulltilt.errors import DataError, FulltiltError, UsageError
from fulltilt.hardware.cpu import read_memory_bytes
from fulltilt.levers.thread_affinity import cores_before, leave_core
from fulltilt.records import format_bytes


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
    """Build a DataLoader whose ``sampler`` is an ``EpochSampler`` and whose ``dataset.source`` is ``dataset``.

    A map-style dataset may offer ``get_batch(indices, generator=None) -> (inputs, targets)`` (``generator`` may be
    left out); a batch is then one call instead of one call per sample.

    Args:
        dataset: Map-style or iterable. An iterable one decides its order itself: ``shuffle`` has no effect.
        shuffle: A new order per epoch, see ``EpochSampler.set_epoch``.
        generator: Where torch draws the base seed of its workers from; its initial seed is the default of ``seed``.
        options: Further keywords of DataLoader, and three of our own: ``placement`` and ``placement_device`` say where
            the rows lie, see ``place``; ``transforms`` "device" takes the pipeline out of a dataset that allows it, and
            ``loader.transform`` is then what the step has to do.
        worker_options: ``threads``: intra-op threads per worker; None leaves torch's one.
        collate: Joins samples to a batch; switches whole-batch reads off.
        seed: Of order and augmentation; torch's own initial seed when neither it nor ``generator`` is given.
        skip_limit: How many samples that cannot be read may be left out (``loader.dataset.bad_samples``); with None the
            first one is an error. A placement that reads all of them beforehand skips none.
        share: The part of every batch that this process loads; the whole when None. Iterable datasets are not divided.

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
    common = {"batch_size": batch_size, "drop_last": drop_last, "generator": generator, **options}
    if n_workers:
        context = options.get("multiprocessing_context")
        method = context if isinstance(context, str) else (context or multiprocessing).get_start_method()
        parent = None if method == "forkserver" else os.getpid()
        threads = (worker_options or {}).get("threads")
        common["worker_init_fn"] = functools.partial(_start_worker, parent, threads, cores_before)
    if isinstance(dataset, IterableDataset):
        if skip_limit is not None:
            raise DataError(
                f"data.on_bad_sample skip needs samples with a number, and {type(dataset).__name__} streams; use stop"
            )
        return _build_quietly(dataset, collate_fn=collate or fast_collate, **common)
    if seed is None:
        seed = generator.initial_seed() if generator is not None else torch.initial_seed()
    sampler = _build_sampler(dataset, shuffle, placement, seed, share_epoch=n_workers > 0)
    fetcher = BatchFetcher(dataset, seed=seed, epoch_cell=sampler.epoch_cell, whole_batches=collate is None)
    if skip_limit is not None:
        fetcher.bad_samples = BadSamples(dataset, len(fetcher), skip_limit, share=n_workers > 0)
    collate = collate or (identity if fetcher.has_whole_batches else fast_collate)
    loader = _build_quietly(fetcher, kind=IndexedLoader, sampler=sampler, collate_fn=collate, **common)
    assert isinstance(loader, IndexedLoader)
    loader.transform, loader.share = transform, share
    return loader


def _build_sampler(
    dataset: Dataset, shuffle: bool, placement: str, seed: int, *, share_epoch: bool
) -> BlockSampler | EpochSampler:
    """Build the sampler of a map-style dataset, by its placement."""
    if shuffle and placement == "block_shuffled":
        blocks = plan_blocks(dataset)
        return BlockSampler(blocks.edges, blocks.n_mixed, seed, share_epoch=share_epoch)
    try:
        n_samples = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no length; give it __len__, or derive it from "
            f"torch.utils.data.IterableDataset when it streams"
        ) from None
    if (n_bytes := 8 * n_samples) > read_memory_bytes()[0]:
        raise DataError(
            f"{type(dataset).__name__} says that it holds {n_samples:,} samples, whose order alone takes "
            f"{format_bytes(n_bytes)} of memory; mend its __len__, or derive it from torch.utils.data.IterableDataset"
        )
    return EpochSampler(n_samples, shuffle, seed, share_epoch=share_epoch)


def _build_quietly(dataset: Dataset, kind: type[DataLoader] = GuardedLoader, **options: Any) -> DataLoader:
    """Build a loader without torch's warning of more workers than cores, which ``check`` says in a line."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return kind(dataset, **options)


class IndexedLoader(GuardedLoader):
    """Passes batches of indices on as arrays, and reads batches without workers by itself.

    torch's own iterator marks each batch for its profiler, whether or not one runs: 35 µs a batch, a fifth of what
    gathering 256 rows of 5 KB takes.

    Attributes:
        transform: The pipeline taken out of the dataset, for the step.
        share: The part of every batch that this process loads.
    """

    transform: Pipeline | None = None
    share: Share | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.num_workers or self.pin_memory:
            return super().__iter__()
        # torch would draw a seed for its workers here; later draws have to stay the same.
        torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        order = self._index_sampler  # read now: the share may change before the first batch
        return (self.collate_fn(self.dataset.__getitems__(indices)) for indices in order)  # type: ignore[attr-defined]

    @property
    def _index_sampler(self) -> BatchOrder:
        assert self.batch_size is not None
        return BatchOrder(self.sampler, self.batch_size, self.drop_last, self.share)  # type: ignore[arg-type]


class BatchFetcher(Dataset):
    """Reads each batch of a map-style dataset by one call and with one seed.

    The seed is made of (seed, epoch, first index of the batch): a ``get_batch`` that takes a ``generator`` gets one,
    and in a worker torch's, numpy's and Python's global generators are seeded as well. In the main process these
    belong to the training step and are not touched.

    Attributes:
        source: The dataset itself.
        has_whole_batches: Whether ``__getitems__`` returns a batch and not a list of samples.
        bad_samples: Samples left out because they cannot be read; with None the first one is an error.
    """

    bad_samples: BadSamples | None = None

    def __init__(self, source: Any, *, seed: int, epoch_cell: torch.Tensor, whole_batches: bool = True):
        self.source = source
        self.has_whole_batches = whole_batches and callable(getattr(source, "get_batch", None))
        self._seed, self._epoch_cell = seed, epoch_cell
        self._takes_generator = self.has_whole_batches and "generator" in inspect.signature(source.get_batch).parameters
        self._takes_arrays = isinstance(source, BatchedDataset)  # a user's own gets a list, as from torch
        transform = getattr(source, "transform", ...)
        draws_nothing = transform is None or (isinstance(transform, Raw) and not transform.sizing.steps)
        self._is_plain = self._takes_arrays and self.has_whole_batches and draws_nothing

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]

    def __getitems__(self, indices: np.ndarray | list[int]) -> Any:
        first, bad = int(indices[0]), self.bad_samples
        if bad is None:
            try:
                return self._read(indices, first)
            except FulltiltError as error:
                if isinstance(error.__cause__, UNREADABLE):  # a damaged file, in our own readers
                    raise DataError(f"{error}, or {SKIP_REMEDY}") from error.__cause__
                raise
            except Exception as error:  # of the user's own code
                if not any(note.endswith(READING) for note in getattr(error, "__notes__", ())):
                    error.add_note(f"a batch that begins with {name_sample(self.source, first)}{READING}")
                raise
        while True:
            chosen = bad.replace_in(np.asarray(indices))
            try:
                return self._read(chosen, first)
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
        """Read one batch with a seed made of the sample ``first``."""
        try:
            return self._read_seeded(indices, first)
        except StopIteration as error:  # it would end the epoch silently
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
            # torch.manual_seed also queues a seed for devices and walks the stack for it: 97 µs against 1 µs.
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            random.seed(seed)
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
                samples.append(self.source[index])  # the error below has to know how far it came
        except FulltiltError:
            raise
        except Exception as error:  # of the user's own code
            error.add_note(f"{name_sample(self.source, indices[len(samples)])}{READING}")
            raise
        return samples


def _start_worker(parent: int | None, threads: int | None, cores: Sequence[int], worker_id: int) -> None:
    guard_worker(parent)
    leave_core(cores)  # of the training process' thread that starts it, where that is pinned
    if threads is not None:
        torch.set_num_threads(threads)
