"""Rows of a plain HDF5 dataset, gathered out of the mapped file without a call per row."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_layout import Layout, Pieces, assemble
from fulltilt.errors import DataError

STREAM_WINDOW_BYTES = 256 << 20
"""How much of the file a streaming process keeps mapped. Pages beyond it stay in the page cache."""
_FAULT_BYTES = 64 << 10  # Linux maps so much around a page that is touched and cached (fault_around_bytes)
_PAGE = mmap.PAGESIZE


class MappedRows:
    """Gathers rows of one array, or of chunks without filters, out of the mapped file.

    The mapping is shared and read-only: it may cross a fork, and a pickle leaves it out. Where pages of a batch are not
    in the page cache, all of them are requested before the gather, so that the disk sees the whole batch at once.

    Source: ``benchmarks/results/hdf5_loader-cpu.json`` for files in the page cache. From a cold disk (a shared virtual
    one, 5 KB rows, batches of 256) requesting first gave 8,600 to 12,700 random rows/s, ``pread`` by row 800 to 900.

    Args:
        layout: Of the dataset.
        pieces: Where its rows lie.
        window_bytes: Mapped pages beyond this are dropped from the process's resident set; None keeps all.
    """

    def __init__(self, layout: Layout, pieces: Pieces, window_bytes: int | None = STREAM_WINDOW_BYTES):
        self.layout, self.window_bytes = layout, window_bytes
        self.pieces, self._end = pieces, pieces.end
        self._is_one_array = pieces.starts.shape == (1, 1)
        self._is_bounded = window_bytes is not None and layout.n_bytes > window_bytes
        self._descriptor, self._touched_bytes = -1, 0
        self._map: Any = None
        self._view: Any = None  # (rows, 1, bytes) of one array, else (positions, piece_bytes), overlapping

    @property
    def placement(self) -> str:
        return "memory_map" if self.window_bytes is None else "stream"

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read (len(indices), *row_shape) in the order asked for; DataError where the file became shorter."""
        rows = np.asarray(indices, dtype=np.int64)
        layout, pieces = self.layout, self.pieces
        if not len(rows):
            return np.empty((0, *layout.row_shape), dtype=layout.dtype)
        if self._descriptor < 0:
            self._descriptor = open_descriptor(self, layout.path)
        self._check_length()
        if self._map is None:
            self._map_file()
        self._fetch_missing(rows)
        if self._is_one_array:
            raw_BPb = np.empty((len(rows), 1, pieces.piece_bytes), dtype=np.uint8)
            # "clip" writes into ``out`` without a buffer between; indices were checked where rows were picked.
            np.take(self._view, rows, axis=0, out=raw_BPb, mode="clip")
        else:
            raw_BPb = self._view[pieces.find(rows)]
        if self._is_bounded:
            self._touched_bytes += len(rows) * pieces.n_pieces * (pieces.piece_bytes + _FAULT_BYTES)
            if self._touched_bytes > (self.window_bytes or 0):
                self._map.madvise(mmap.MADV_DONTNEED)
                self._touched_bytes = 0
        return assemble(raw_BPb, pieces, layout)

    def _map_file(self) -> None:
        try:
            self._map = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            remedy = "raise the limit on address space (ulimit -v)"
            raise DataError(f"{self.layout.path} cannot be mapped ({error}); {remedy}") from error
        # A miss then reads the page and not 128 KB around it; what a batch needs is requested in _fetch_missing.
        self._map.madvise(mmap.MADV_RANDOM)
        everything, n = np.frombuffer(self._map, dtype=np.uint8), self.pieces.piece_bytes
        if self._is_one_array:
            self._view = everything[int(self.pieces.starts[0, 0]) : self._end].reshape(-1, 1, n)
        else:
            shape = (len(everything) - n + 1, n)
            self._view = np.lib.stride_tricks.as_strided(everything, shape, (1, 1), writeable=False)

    def _check_length(self) -> None:
        """Raise DataError for a file that was cut: touching a page behind its end would kill the process (SIGBUS)."""
        size = os.fstat(self._descriptor).st_size
        if size < self._end:
            raise DataError(
                f"{self.layout.path} was cut: {size:,} bytes are there and {self.layout.name} reaches to "
                f"{self._end:,}; copy or make it again"
            )

    def _fetch_missing(self, rows: np.ndarray) -> None:
        """Request the whole batch at once where its first or last row is not in the page cache."""
        first, last = self.pieces.find_first(int(rows[0])), self.pieces.find_first(int(rows[-1]))
        if is_cached(self._descriptor, first) is not False and is_cached(self._descriptor, last) is not False:
            return
        for start, length in plan_ranges(self.pieces.find(rows), self.pieces.piece_bytes):
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.layout, self.pieces, self.window_bytes)


def open_descriptor(owner: Any, path: Path) -> int:
    """Open a file for reading until ``owner`` is garbage collected."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(f"{path} cannot be opened ({error.strerror})") from error
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def plan_ranges(positions: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Plan ranges of whole pages, (start, length) in rising order, that hold ``length`` bytes at each position."""
    starts = np.unique(positions // _PAGE)
    ends = np.unique((positions + length - 1) // _PAGE) + 1
    if length > _PAGE:
        breaks = np.flatnonzero(starts[1:] > ends[:-1]) + 1
    else:
        starts = np.union1d(starts, ends - 1)
        ends = starts + 1
        breaks = np.flatnonzero(np.diff(starts) > 1) + 1
    firsts = starts[np.concatenate(([0], breaks))] * _PAGE
    lasts = ends[np.append(breaks, len(ends)) - 1] * _PAGE
    return list(zip(firsts.tolist(), (lasts - firsts).tolist(), strict=True))


def is_cached(descriptor: int, position: int) -> bool | None:
    """Tell whether a byte of a file is in the page cache; None where the system cannot say."""
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except (OSError, AttributeError):
        return None
    return True
