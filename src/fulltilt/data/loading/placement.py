"""Place the rows of a dataset for training.

From fast to frugal: ``device`` (all rows on the device, gathered there), ``ram`` (all rows in host memory),
``memory_map`` (the file mapped, the page cache holds what fits), ``block_shuffled`` (read in whole blocks, in an order
that allows it), ``stream`` (each batch reads its rows from the file).
"""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulltilt.config.bad_samples import explain_unskipped
from fulltilt.data.loading.block_sampler import compute_batch_variance_ratio, compute_meeting_share
from fulltilt.data.tables.hdf5 import RowsDataset
from fulltilt.data.tables.hdf5_mapped import MappedRows
from fulltilt.data.tables.held_rows import WindowedRows, compute_held_bytes, hold_rows
from fulltilt.data.transforms.batch_transform import find_transforms
from fulltilt.errors import DataError
from fulltilt.hardware import (
    compute_usable_device_bytes,
    is_wsl,
    read_filesystem,
    read_memory_bytes,
    read_memory_room_bytes,
    read_rss_bytes,
)
from fulltilt.measure import find_memory_limit_bytes

BLOCK_BYTES = 1 << 20  # a block is read in one go; below this the start of a read costs more than the read
WINDOW_BYTES = 256 << 20  # kept by every process: the window being read out and the one being filled


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a file is cut for block shuffle.

    Attributes:
        edges: Index of the first sample of every block, and the number of samples.
        block_rows: B, rows of the file in a block; a multiple of a chunk's.
        n_mixed: W, blocks in a window.
    """

    edges: np.ndarray
    block_rows: int
    n_mixed: int

    def describe(self, batch_size: int) -> str:
        """Describe the order and how far from a full shuffle it can be."""
        n_samples = int(self.edges[-1])
        n_mixed = min(self.n_mixed, len(self.edges) - 1)
        share = compute_meeting_share(n_samples, self.block_rows, n_mixed)
        ratio = compute_batch_variance_ratio(n_samples, self.block_rows, n_mixed, batch_size)
        return (
            f"{len(self.edges) - 1} blocks of {self.block_rows} rows, {n_mixed} mixed at a time: in an epoch "
            f"{100 * share:.3g} % of all pairs of rows can meet in a batch, and batch means vary at most {ratio:.2f} "
            f"times as much as fully shuffled (in variance; reached by a file sorted by what is learnt)"
        )


def find_placements(dataset: Any) -> tuple[str, ...]:
    """List the values of the lever ``placement`` that this dataset can take, whatever its size."""
    transforms = find_transforms(dataset)
    if not isinstance(dataset, RowsDataset):
        if not hasattr(dataset, "hold"):
            return ("stream",)
        return ("stream", "ram") if transforms == "own" else ("stream", "ram", "device")
    placements = ["stream", "block_shuffled", "ram"]
    is_local = not read_filesystem(dataset.path).is_network
    if is_local and all(isinstance(source, MappedRows) for source in dataset.sources):
        placements.append("memory_map")
    if dataset.transform is None or transforms == "pipeline":
        placements.append("device")
    return tuple(placements)


def count_held_bytes(dataset: Any) -> int | None:
    """Count the bytes of all rows in memory; None for a dataset that cannot be held."""
    if not isinstance(dataset, RowsDataset):
        return getattr(dataset, "held_bytes", None)
    return sum(compute_held_bytes(layout, len(dataset)) for layout in dataset.layouts)


def count_mixed_blocks(dataset: Any) -> int | None:
    """Count the blocks in a window of block shuffle; None for no table, and where one window holds all."""
    if not isinstance(dataset, RowsDataset):
        return None
    blocks = plan_blocks(dataset)
    return blocks.n_mixed if blocks.n_mixed < len(blocks.edges) - 1 else None


def read_free_ram_bytes(root: str | Path = "/", *, n_processes: int = 1) -> int:
    """Read how much host memory this process can still take.

    That is the least of what the machine has, what its control groups leave, and what a memory limit on the CPU leaves
    (``measure.apply_memory_limit``). ``n_processes`` share the first two. Tests set ``root``.
    """
    _, available_bytes = read_memory_bytes(root)
    shared = [available_bytes, read_memory_room_bytes(root)]
    rooms = [room // n_processes for room in shared if room is not None]
    limit_bytes, resident_bytes = find_memory_limit_bytes("cpu"), read_rss_bytes(os.getpid())
    if limit_bytes is not None and resident_bytes is not None:
        rooms.append(max(0, limit_bytes - resident_bytes))
    return min(rooms)


def read_free_device_bytes(device: torch.device) -> int | None:
    """Read how much of a GPU's memory this process can still take; None where there is none.

    What torch has reserved and not used is free; what lies past a memory limit, or under WSL where the driver would
    spill, is not.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)  # what all processes leave of it
    limits = [compute_usable_device_bytes(total_bytes, is_wsl=is_wsl()), find_memory_limit_bytes(device)]
    rooms = [free_bytes + torch.cuda.memory_reserved(device), *(limit for limit in limits if limit is not None)]
    return max(0, min(rooms) - torch.cuda.memory_allocated(device))


def place(
    dataset: Any, placement: str, device: torch.device, *, is_pinned: bool = False, wants_skip: bool = False
) -> Any:
    """Return the same samples with their rows at ``placement``; the dataset itself stays unchanged.

    Args:
        placement: A value of the lever that ``find_placements`` lists; ``stream`` suits any dataset.
        device: Of the training step.
        is_pinned: ``ram`` gathers batches into page-locked memory.
        wants_skip: Add to an error that ``ram`` and ``device`` cannot leave out samples.

    Raises:
        DataError: This dataset cannot be placed so, or a sample of those that are held cannot be read.
    """
    if placement == "stream":
        return dataset
    offered = find_placements(dataset)
    if placement not in offered:
        raise DataError(
            f"placement {placement} cannot apply to {type(dataset).__name__}; it can be {', '.join(offered)}"
        )
    if placement == "block_shuffled":
        blocks = plan_blocks(dataset)
        windows = [WindowedRows(source, blocks.block_rows, 2 * blocks.n_mixed) for source in dataset.sources]
        return dataset.with_sources(tuple(windows))
    if placement == "memory_map":
        mapped = [MappedRows(source.layout, source.pieces, None) for source in dataset.sources]
        return dataset.with_sources(tuple(mapped))
    where = device if placement == "device" else torch.device("cpu")
    what = f"placement {placement}, which reads all samples beforehand (placement stream skips)"
    with explain_unskipped(what) if wants_skip else contextlib.nullcontext():
        if not isinstance(dataset, RowsDataset):
            return dataset.hold(where, is_pinned=is_pinned)
        held = tuple(hold_rows(source, dataset.rows, where, is_pinned=is_pinned) for source in dataset.sources)
    return dataset.with_sources(held, rows=np.arange(len(dataset)))


def plan_blocks(dataset: RowsDataset) -> Blocks:
    """Plan blocks of whole chunks and about 1 MiB; at least two are mixed, and as many as fit in half a window."""
    layout = dataset.layouts[0]
    block_rows = layout.count_rows_in(BLOCK_BYTES)
    n_mixed = max(2, WINDOW_BYTES // 2 // max(1, block_rows * layout.row_bytes))
    borders = np.arange(0, layout.n_rows + block_rows, block_rows)
    return Blocks(edges=np.unique(np.searchsorted(dataset.rows, borders)), block_rows=block_rows, n_mixed=n_mixed)
