"""Rows kept in memory: all of them as one tensor, or the last few blocks that were read."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from fulltilt.data.collate import empty_shared
from fulltilt.data.tables.hdf5_layout import Layout
from fulltilt.data.tables.hdf5_rows import Rows

_BLOCK_BYTES = 32 << 20
_ABSENT = -1
_SMALL_TYPES = {"f2": torch.float16, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "b1": torch.bool}


class HeldRows:
    """Gathers rows of a table (N, *row_shape) in host memory or on a device.

    With ``is_pinned`` batches are gathered into page-locked memory, ready for an asynchronous copy.
    """

    def __init__(self, table: Tensor, layout: Layout, *, is_pinned: bool = False):
        self.table, self.is_pinned = table, is_pinned
        self.layout = dataclasses.replace(layout, shape=tuple(table.shape))

    @property
    def placement(self) -> str:
        return "ram" if self.table.device.type == "cpu" else "device"

    def read(self, indices: Sequence[int] | np.ndarray) -> Tensor:
        return gather_rows(self.table, indices, is_pinned=self.is_pinned)


def gather_rows(table: Tensor, indices: Sequence[int] | np.ndarray, *, is_pinned: bool = False) -> Tensor:
    """Gather (len(indices), *row_shape) on the device of the table.

    Device: on a GPU enqueues one small copy and one kernel; does not synchronise.
    """
    rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
    if table.device.type != "cpu":
        return table.index_select(0, rows.pin_memory().to(table.device, non_blocking=True))
    if not is_pinned and get_worker_info() is None:
        return table.index_select(0, rows)
    shape = (len(rows), *table.shape[1:])
    in_worker = get_worker_info() is not None
    out = empty_shared(shape, table.dtype) if in_worker else torch.empty(shape, dtype=table.dtype, pin_memory=True)
    return torch.index_select(table, 0, rows, out=out)


def hold_rows(source: Rows, rows: np.ndarray, device: torch.device, *, is_pinned: bool = False) -> HeldRows:
    """Read ``rows`` (rising) of a table once, in order, into one tensor.

    Memory: the table, and one block of 32 MiB or one chunk while it is read.
    """
    layout = source.layout
    table = torch.empty((len(rows), *layout.row_shape), dtype=find_held_type(layout.dtype), device=device)
    step = layout.count_rows_in(_BLOCK_BYTES)
    borders = np.searchsorted(rows, np.arange(0, layout.n_rows + step, step))  # whole chunks: none is read twice
    for first, end in itertools.pairwise(np.unique(borders).tolist()):
        block = torch.from_numpy(_to_native(source.read(rows[first:end])))
        table[first:end].copy_(block)
    return HeldRows(table, layout, is_pinned=is_pinned)


def find_held_type(dtype: np.dtype) -> torch.dtype:
    """Return the smallest type that keeps what training reads: float64 becomes float32 anyway."""
    if dtype == np.uint8:
        return torch.uint8
    wide = torch.float32 if dtype.kind == "f" else torch.int64
    return _SMALL_TYPES.get(f"{dtype.kind}{dtype.itemsize}", wide)


def compute_held_bytes(layout: Layout, n_rows: int) -> int:
    """Compute the size of ``n_rows`` rows in memory."""
    return n_rows * math.prod(layout.row_shape) * find_held_type(layout.dtype).itemsize


def _to_native(rows: np.ndarray | Tensor) -> np.ndarray:
    array = rows.numpy() if isinstance(rows, Tensor) else rows
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return array.astype(np.int64)
    return array.astype(array.dtype.newbyteorder("="), copy=False)


class WindowedRows:
    """Reads whole blocks for block shuffle and keeps the ``n_kept`` that were used last.

    A batch that needs more blocks reads its rows from the source. Every process keeps blocks of its own, so each data
    worker reads (and decompresses) the whole file once an epoch: workers share the work on batches, not the reading.
    """

    placement = "block_shuffled"

    def __init__(self, source: Rows, block_rows: int, n_kept: int):
        self.layout = source.layout
        self.source, self.block_rows = source, block_rows
        n_blocks = -(-self.layout.n_rows // block_rows)
        self.n_kept = min(n_kept, n_blocks)
        self._kept: Any = None
        self._slots = np.full(n_blocks, _ABSENT, dtype=np.int64)
        self._last_read = np.zeros(self.n_kept, dtype=np.int64)
        self._n_reads = 0

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read (len(indices), *row_shape) in the order asked for."""
        rows = np.asarray(indices, dtype=np.int64)
        blocks, within = np.divmod(rows, self.block_rows)
        needed = np.unique(blocks)
        if len(needed) > self.n_kept:
            return np.asarray(self.source.read(rows))
        if self._kept is None:
            self._kept = np.empty((self.n_kept * self.block_rows, *self.layout.row_shape), dtype=self.layout.dtype)
        self._n_reads += 1
        there = self._slots[needed]
        self._last_read[there[there != _ABSENT]] = self._n_reads
        for block in needed[there == _ABSENT].tolist():
            self._fill(block)
        out = np.empty((len(rows), *self.layout.row_shape), dtype=self.layout.dtype)
        return np.take(self._kept, self._slots[blocks] * self.block_rows + within, axis=0, out=out, mode="clip")

    def _fill(self, block: int) -> None:
        slot = int(self._last_read.argmin())
        self._slots[self._slots == slot] = _ABSENT
        first = block * self.block_rows
        end = min(first + self.block_rows, self.layout.n_rows)
        at = slot * self.block_rows
        self._kept[at : at + end - first] = self.source.read(np.arange(first, end))
        self._slots[block] = slot
        self._last_read[slot] = self._n_reads

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.source, self.block_rows, self.n_kept)
