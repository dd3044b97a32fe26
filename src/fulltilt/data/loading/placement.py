"""Where the rows of a dataset lie while it is trained on, and what it takes to put them there.

From fastest to frugal: ``device`` (all rows on the device, gathered there), ``ram`` (all rows in host memory),
``memory_map`` (the file mapped, the page cache holds what fits), ``block_shuffled`` (read in whole blocks, in an order
that allows it), ``stream`` (each batch reads its rows from the file).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fulltilt.config.bad_samples import explain_unskipped
from fulltilt.data.loading.block_sampler import compute_batch_variance_ratio, compute_meeting_share
from fulltilt.data.tables.hdf5_layout import Layout, find_pieces
from fulltilt.data.tables.hdf5_mapped import MappedRows
from fulltilt.data.tables.held_rows import WindowedRows, compute_held_bytes, hold_rows
from fulltilt.data.tables.rows_dataset import RowsDataset
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
        edges: First index of every block, in samples, and their number.
        block_rows: B, in rows of the file; a multiple of a chunk's.
        n_mixed: W.
    """

    edges: np.ndarray
    block_rows: int
    n_mixed: int

    def describe(self, batch_size: int) -> str:
        """What the order is, and how far from a full shuffle it can be."""
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
    """Values of the lever ``placement`` that this dataset can take, whatever its size."""
    can_defer = find_transforms(dataset) == "pipeline"
    if not isinstance(dataset, RowsDataset):
        is_holdable = hasattr(dataset, "hold")
        has_own = find_transforms(dataset) == "own"
        return ("stream", "ram", *([] if has_own else ["device"])) if is_holdable else ("stream",)
    placements = ["stream", "block_shuffled", "ram"]
    is_local = not read_filesystem(dataset.path).is_network
    if is_local and all(isinstance(source, MappedRows) for source in dataset.sources):
        placements.append("memory_map")
    if dataset.transform is None or can_defer:
        placements.append("device")
    return tuple(placements)


def count_held_bytes(dataset: Any) -> int | None:
    """What the rows take once all are held in memory; None for a dataset that cannot be held."""
    if not isinstance(dataset, RowsDataset):
        return getattr(dataset, "held_bytes", None)
    return sum(compute_held_bytes(layout, len(dataset)) for layout in dataset.layouts)


def count_mixed_blocks(dataset: Any) -> int | None:
    """Blocks in a window of block shuffle; None for no table, and where a window holds all: that is a full shuffle."""
    if not isinstance(dataset, RowsDataset):
        return None
    blocks = plan_blocks(dataset)
    return blocks.n_mixed if blocks.n_mixed < len(blocks.edges) - 1 else None


def read_free_ram_bytes(root: str | Path = "/", *, n_processes: int = 1) -> int:
    """What this process could still take of host memory.

    The least of what the machine has, what its control groups leave, and what a memory limit on the CPU leaves
    (``measure.apply_memory_limit``).

    Args:
        root: Of the machine's files, so that a planted tree can stand in.
        n_processes: That share the machine, this one among them; a limit on the CPU is each one's own.
    """
    _, available_bytes = read_memory_bytes(root)
    shared = [available_bytes, read_memory_room_bytes(root)]
    rooms = [*(room // n_processes for room in shared if room is not None), _read_room_below_cpu_limit()]
    return min(room for room in rooms if room is not None)


def read_free_device_bytes(device: torch.device) -> int | None:
    """What this process could still take of a GPU's memory; None where there is none.

    What torch has reserved and not used is free; what lies past a memory limit, or under WSL where the driver would
    spill, is not.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return compute_free_device_bytes(
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        reserved_bytes=torch.cuda.memory_reserved(device),
        allocated_bytes=torch.cuda.memory_allocated(device),
        limit_bytes=find_memory_limit_bytes(device),
        is_wsl=is_wsl(),
    )


def compute_free_device_bytes(
    *,
    free_bytes: int,
    total_bytes: int,
    reserved_bytes: int,
    allocated_bytes: int,
    limit_bytes: int | None,
    is_wsl: bool,
) -> int:
    """Of a GPU with ``free_bytes`` left by all processes, of which this one has reserved and allocated so much."""
    usable_bytes = compute_usable_device_bytes(total_bytes, is_wsl=is_wsl)
    most_bytes = usable_bytes if limit_bytes is None else min(usable_bytes, limit_bytes)
    return max(0, min(free_bytes + reserved_bytes, most_bytes) - allocated_bytes)


def place(
    dataset: Any, placement: str, device: torch.device, *, is_pinned: bool = False, wants_skip: bool = False
) -> Any:
    """The same samples with their rows at ``placement``; the dataset itself is left as it is.

    Args:
        dataset: One whose ``find_placements`` names the value; ``stream`` suits any.
        placement: A value of the lever.
        device: Of the training step.
        is_pinned: ``ram`` gathers batches into page-locked memory.
        wants_skip: Samples that cannot be read were to be left out: an error says that ``ram`` and ``device`` do not.

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
        return _place_windowed(dataset)
    if placement == "memory_map":
        sources = tuple(_map_whole(source.layout) for source in dataset.sources)
        return dataset.with_sources(sources)
    where = device if placement == "device" else torch.device("cpu")
    what = f"placement {placement}, which reads all samples beforehand (placement stream skips)"
    with explain_unskipped(what) if wants_skip else contextlib.nullcontext():
        if not isinstance(dataset, RowsDataset):
            return dataset.hold(where, is_pinned=is_pinned)
        held = tuple(hold_rows(source, dataset.rows, where, is_pinned=is_pinned) for source in dataset.sources)
    return dataset.with_sources(held, rows=np.arange(len(dataset)))


def plan_blocks(dataset: RowsDataset) -> Blocks:
    """Blocks of whole chunks and about a mebibyte; as many mixed as fit twice into ``WINDOW_BYTES``, two at least."""
    layout = dataset.layouts[0]
    block_rows = layout.count_rows_in(BLOCK_BYTES)
    n_mixed = max(2, WINDOW_BYTES // 2 // max(1, block_rows * layout.row_bytes))
    borders = np.arange(0, layout.n_rows + block_rows, block_rows)
    return Blocks(edges=np.unique(np.searchsorted(dataset.rows, borders)), block_rows=block_rows, n_mixed=n_mixed)


def _read_room_below_cpu_limit() -> int | None:
    limit_bytes, resident_bytes = find_memory_limit_bytes("cpu"), read_rss_bytes(os.getpid())
    if limit_bytes is None or resident_bytes is None:
        return None
    return max(0, limit_bytes - resident_bytes)


def _place_windowed(dataset: RowsDataset) -> RowsDataset:
    blocks = plan_blocks(dataset)
    inputs, targets = (
        WindowedRows(source, block_rows=blocks.block_rows, n_kept=2 * blocks.n_mixed) for source in dataset.sources
    )
    return dataset.with_sources((inputs, targets))


def _map_whole(layout: Layout) -> MappedRows:
    pieces = find_pieces(layout)
    if pieces is None:
        raise DataError(f"{layout.path}: {layout.name} has changed and cannot be mapped any more; use placement stream")
    return MappedRows(layout, pieces, window_bytes=None)
