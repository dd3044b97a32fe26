"""Rows read in whole blocks, of which the last few are kept: what block shuffle reads through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_rows import Rows

_ABSENT = -1


class WindowedRows:
    """Reads block-wise and remembers blocks, the longest unused first to go.

    Every process keeps its own blocks, so each data worker reads (and decompresses) the whole file once an epoch: more
    workers share the work on batches, not the reading.

    Args:
        source: Where blocks are read from.
        block_rows: Rows of a block, counted from row 0 of the table.
        n_kept: Blocks kept; a batch that needs more reads its rows from the source.
    """

    placement = "block_shuffled"

    def __init__(self, source: Rows, *, block_rows: int, n_kept: int):
        self.layout = source.layout
        self.source, self.block_rows = source, block_rows
        self.n_kept = min(n_kept, -(-self.layout.n_rows // block_rows))
        self._forget()

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """(len(indices), *row_shape), in the order asked for.

        Memory: ``n_kept`` blocks, taken as they are filled.
        """
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

    def _forget(self) -> None:
        self._kept: Any = None
        self._slots = np.full(-(-self.layout.n_rows // self.block_rows), _ABSENT, dtype=np.int64)
        self._last_read = np.zeros(self.n_kept, dtype=np.int64)
        self._n_reads = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"source": self.source, "block_rows": self.block_rows, "n_kept": self.n_kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["source"], block_rows=state["block_rows"], n_kept=state["n_kept"])
