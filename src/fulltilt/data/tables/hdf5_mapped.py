"""Rows of a plain HDF5 dataset out of the mapped file: a gather from memory, without a call per row."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_layout import Layout, Pieces, assemble
from fulltilt.errors import DataError

STREAM_WINDOW_BYTES = 256 << 20
"""How much of the file a streaming process keeps mapped. What is dropped stays in the page cache."""
_FAULT_BYTES = 64 << 10  # Linux maps so much around a page that is touched and cached (fault_around_bytes)
_PAGE = mmap.PAGESIZE


class MappedRows:
    """Rows of one array or of chunks without filters, gathered out of the mapped file.

    The mapping is shared and read-only: it may cross a fork, and a pickle leaves it out. A batch whose pages are not
    in the page cache is asked for as a whole before it is gathered, so that the disk sees all its rows at once.

    Source: ``benchmarks/results/hdf5_loader-cpu.json`` for files in the page cache. From a cold disk (a shared virtual
    one, 5 KB rows, batches of 256) asking first gave 8,600 to 12,700 random rows/s, ``pread`` row by row 800 to 900.

    Args:
        layout: Of the dataset.
        pieces: Where its rows lie.
        window_bytes: Pages mapped beyond this are given back: they count in the resident set of the process. None
            keeps whatever was touched.
    """

    def __init__(self, layout: Layout, pieces: Pieces, *, window_bytes: int | None = STREAM_WINDOW_BYTES):
        self.layout, self.window_bytes = layout, window_bytes
        self._pieces = pieces
        self._end = pieces.end
        self._is_bounded = window_bytes is not None and layout.n_bytes > window_bytes
        self._unmap()

    @property
    def placement(self) -> str:
        return "memory_map" if self.window_bytes is None else "stream"

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(len(indices), *row_shape), in the order asked for.

        Raises:
            DataError: The file has become shorter, or cannot be opened.
        """
        rows = np.asarray(indices, dtype=np.int64)
        layout, pieces = self.layout, self._pieces
        if not len(rows):
            return np.empty((0, *layout.row_shape), dtype=layout.dtype)
        self._open()
        self._check_length()
        self._fetch_missing(rows)
        raw_BPb = self._gather(rows)
        if self._is_bounded:
            self._give_back(len(rows) * pieces.n_pieces * (pieces.piece_bytes + _FAULT_BYTES))
        return assemble(raw_BPb, pieces, layout)

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        pieces = self._pieces
        if pieces.is_one_array:
            raw = np.empty((len(rows), 1, pieces.piece_bytes), dtype=np.uint8)
            # "clip" writes into ``out`` without a buffer between; indices were checked where rows were picked.
            return np.take(self._array, rows, axis=0, out=raw, mode="clip")
        return self._windows[pieces.find(rows)]

    def _open(self) -> None:
        if self._map is not None:
            return
        try:
            descriptor = os.open(self.layout.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{self.layout.path} cannot be opened ({error.strerror})") from error
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._check_length()
        try:
            self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except OSError as error:
            remedy = "raise the limit on address space (ulimit -v)"
            raise DataError(f"{self.layout.path} cannot be mapped ({error}); {remedy}") from error
        # A miss then reads the page and not 128 KB around it; what a batch needs is asked for in _fetch_missing.
        self._map.madvise(mmap.MADV_RANDOM)
        self._view_bytes(np.frombuffer(self._map, dtype=np.uint8))

    def _view_bytes(self, everything: np.ndarray) -> None:
        pieces = self._pieces
        if pieces.is_one_array:
            start = int(pieces.starts[0, 0])
            rows = everything[start : start + pieces.group_rows * pieces.piece_bytes]
            self._array = rows.reshape(pieces.group_rows, 1, pieces.piece_bytes)
        else:
            shape = (len(everything) - pieces.piece_bytes + 1, pieces.piece_bytes)
            self._windows = np.lib.stride_tricks.as_strided(everything, shape, (1, 1), writeable=False)

    def _check_length(self) -> None:
        """Touching a page behind the end of a file that was cut would kill the process (SIGBUS)."""
        size = os.fstat(self._descriptor).st_size
        if size < self._end:
            raise DataError(
                f"{self.layout.path} was cut: {size:,} bytes are there and {self.layout.name} reaches to "
                f"{self._end:,}; copy or make it again"
            )

    def _fetch_missing(self, rows: np.ndarray) -> None:
        """Ask for the whole batch at once when a sample of its rows is not in the page cache."""
        first, last = self._pieces.find_first(int(rows[0])), self._pieces.find_first(int(rows[-1]))
        if is_cached(self._descriptor, first) and is_cached(self._descriptor, last):
            return
        for start, length in plan_ranges(self._pieces.find(rows), self._pieces.piece_bytes):
            os.posix_fadvise(self._descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def _give_back(self, n_bytes: int) -> None:
        self._touched_bytes += n_bytes
        if self.window_bytes is not None and self._touched_bytes > self.window_bytes:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._touched_bytes = 0

    def _unmap(self) -> None:
        self._map: Any = None
        self._array: Any = None
        self._windows: Any = None
        self._descriptor = -1
        self._touched_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "pieces": self._pieces, "window_bytes": self.window_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layout"], state["pieces"], window_bytes=state["window_bytes"])


def plan_ranges(positions: np.ndarray, length: int) -> list[tuple[int, int]]:
    """Stretches of whole pages, (start, length) in rising order, that hold ``length`` bytes at each position."""
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


def is_cached(descriptor: int, position: int) -> bool:
    """Whether a byte of a file is in the page cache; True where the file system cannot say."""
    try:
        os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def can_tell_cached(descriptor: int) -> bool:
    """Whether the system and the file system say what lies in the page cache."""
    try:
        os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):
        return False
    return True
