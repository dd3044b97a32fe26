"""Rows held as one tensor, in host memory or on a device."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fulltilt.data.tables.hdf5_layout import Layout
from fulltilt.data.tables.hdf5_rows import Rows

_BLOCK_BYTES = 32 << 20
_SMALL_TYPES = {"f2": torch.float16, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "b1": torch.bool}


class HeldRows:
    """A table that was read once and is gathered from.

    Args:
        table: (N, *row_shape).
        layout: Of the dataset it was read from.
        is_pinned: Batches are gathered into page-locked memory, ready for a copy that does not block.
    """

    def __init__(self, table: Tensor, layout: Layout, *, is_pinned: bool = False):
        self.table, self.is_pinned = table, is_pinned
        self.layout = dataclasses.replace(layout, shape=tuple(table.shape))

    @property
    def placement(self) -> str:
        return "ram" if self.table.device.type == "cpu" else "device"

    def read(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        """(len(indices), *row_shape) where the table lies, in the order asked for: ``gather_rows``."""
        return gather_rows(self.table, indices, is_pinned=self.is_pinned)


def gather_rows(table: Tensor, indices: Sequence[int] | np.ndarray, *, is_pinned: bool = False) -> Tensor:
    """(len(indices), *row_shape) where the table lies: a batch that leaves as it is.

    Device: on a GPU the rows are gathered there; enqueues one small copy and one kernel, does not synchronise.
    """
    rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
    if table.device.type != "cpu":
        return table.index_select(0, rows.pin_memory().to(table.device, non_blocking=True))
    if not is_pinned and get_worker_info() is None:
        return table.index_select(0, rows)
    return torch.index_select(table, 0, rows, out=_allocate_batch(table, len(rows), is_pinned))


def _allocate_batch(table: Tensor, n_rows: int, is_pinned: bool) -> Tensor:
    shape, dtype = (n_rows, *table.shape[1:]), table.dtype
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype, pin_memory=is_pinned)
    # A batch leaves a worker through shared memory; gathering into it saves the copy on the way out.
    n_values = n_rows * table[0].numel()
    storage = torch.UntypedStorage._new_shared(n_values * table.element_size())
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)


def hold_rows(source: Rows, rows: np.ndarray, device: torch.device, *, is_pinned: bool = False) -> HeldRows:
    """Read ``rows`` (rising) of a table once, in order, and hold them.

    Memory: the table, and one block of 32 MiB or one chunk while it is read.
    """
    layout = source.layout
    table = torch.empty((len(rows), *layout.row_shape), dtype=find_held_type(layout.dtype), device=device)
    for first, end in _cut_blocks(layout, rows):
        block = torch.from_numpy(_to_native(source.read(rows[first:end])))
        table[first:end].copy_(block)
    return HeldRows(table, layout, is_pinned=is_pinned)


def find_held_type(dtype: np.dtype) -> torch.dtype:
    """The smallest type that keeps what training reads: float64 is held as the float32 it becomes anyway."""
    if dtype == np.uint8:
        return torch.uint8
    wide = torch.float32 if dtype.kind == "f" else torch.int64
    return _SMALL_TYPES.get(f"{dtype.kind}{dtype.itemsize}", wide)


def compute_held_bytes(layout: Layout, n_rows: int) -> int:
    """What ``n_rows`` rows take once they are held."""
    return n_rows * int(np.prod(layout.row_shape, dtype=np.int64)) * find_held_type(layout.dtype).itemsize


def _to_native(rows: np.ndarray | Tensor) -> np.ndarray:
    array = rows.numpy() if isinstance(rows, Tensor) else rows
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _cut_blocks(layout: Layout, rows: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of ``rows`` that end at chunk borders, so that no chunk is read twice."""
    step = layout.count_rows_in(_BLOCK_BYTES)
    borders = np.searchsorted(rows, np.arange(0, layout.n_rows + step, step))
    edges = np.unique(borders).tolist()
    return list(itertools.pairwise(edges))
