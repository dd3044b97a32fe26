"""Rows per second out of an HDF5 dataset by the order they are asked for, and what the page cache holds of it."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_layout import Layout
from fulltilt.data.tables.hdf5_mapped import can_tell_cached, is_cached
from fulltilt.data.tables.hdf5_rows import Rows
from fulltilt.stats import compute_rate_interval

_BLOCK_BYTES = 1 << 20
_N_PROBES = 256
_N_PARTS = 12  # of a measurement: the unit of replication of its interval
TELLING_PCT = 100.0  # half an interval wider than this says only that nothing is known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """One way of reading, as it was measured.

    Attributes:
        rows_per_s_ci95: Over the parts that the measurement was cut into; None where it was one read, or one part.
    """

    access: str  # random | block_shuffled | sequential | random_row_by_row
    rows_per_s: float
    rows_per_s_ci95: tuple[float, float] | None
    n_rows: int
    rows_a_read: int
    seconds: float

    def __str__(self) -> str:
        """``12,345 ± 2.1 %``: half the interval's width beside the figure."""
        if self.rows_per_s_ci95 is None:
            return f"{self.rows_per_s:,.0f}"
        low, high = self.rows_per_s_ci95
        half_pct = 100 * (high - low) / 2 / self.rows_per_s
        width = f"± {half_pct:.1f} %" if half_pct <= TELLING_PCT else f"± more than {TELLING_PCT:.0f} %"
        return f"{self.rows_per_s:,.0f} {width}"


def _random(layout: Layout, batch_size: int) -> Iterator[np.ndarray]:
    yield from _shuffle(np.arange(layout.n_rows), batch_size)


def _shuffle(rows: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    """Batches of ``rows``, in another order each time round."""
    rng = np.random.default_rng(0)
    while True:
        yield from _cut(rng.permutation(rows), batch_size)


def _block_shuffled(layout: Layout, batch_size: int) -> Iterator[np.ndarray]:
    """Whole blocks of about a mebibyte in random order, as block shuffle reads them into its window."""
    block_rows = layout.count_rows_in(_BLOCK_BYTES)
    rng = np.random.default_rng(0)
    while True:
        for first in rng.permutation(np.arange(0, layout.n_rows, block_rows)).tolist():
            yield np.arange(first, min(first + block_rows, layout.n_rows))


def _sequential(layout: Layout, batch_size: int) -> Iterator[np.ndarray]:
    while True:
        yield from _cut(np.arange(layout.n_rows), batch_size)


ACCESSES: dict[str, Callable[[Layout, int], Iterator[np.ndarray]]] = {
    "random": _random,
    "block_shuffled": _block_shuffled,
    "sequential": _sequential,
    "random_row_by_row": _random,
}


def _cut(order: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    for first in range(0, len(order) - batch_size + 1, batch_size):
        yield order[first : first + batch_size]


class _RowByRow:
    """One h5py read a row, as a Dataset written by hand does it."""

    def __init__(self, layout: Layout):
        import h5py

        self._file = h5py.File(layout.path, "r")
        self._dataset = self._file[layout.name]

    def __call__(self, rows: np.ndarray) -> list[np.ndarray]:
        return [self._dataset[row] for row in rows.tolist()]

    def close(self) -> None:
        self._file.close()


def measure_rate(access: str, layout: Layout, rows: Rows, batch_size: int, seconds: float, cold: bool) -> Rate:
    reader = _RowByRow(layout) if access == "random_row_by_row" else None
    read = reader or rows.read
    try:
        fitting = 1 if reader else _fit_batch(read, layout, batch_size, seconds)
        if cold:
            drop_cache(layout.path)
        return _run(access, read, ACCESSES[access](layout, fitting), seconds, layout.n_rows if cold else None)
    finally:
        if reader:
            reader.close()


def measure_warm_rate(layout: Layout, rows: Rows, batch_size: int, seconds: float) -> Rate:
    """Random batches of rows that were read just before: the page cache holds them, whatever it held at first.

    They are drawn as the way of reading called ``random`` draws them. The same batches over and over were read up to a
    quarter faster, of a file of 16 MB: no order to draw, and the places of a batch still in the processor's cache.

    Cost: ``seconds`` at most to read them the first time, and ``seconds`` to time them.
    """
    fitting = _fit_batch(rows.read, layout, batch_size, seconds)
    order = np.random.default_rng(0).permutation(layout.n_rows)
    kept = _read_once(rows.read, _cut(order, fitting), seconds)
    return _run("random", rows.read, _shuffle(np.sort(np.concatenate(kept)), fitting), seconds, None)


def _read_once(read: Callable[[np.ndarray], Any], batches: Iterator[np.ndarray], seconds: float) -> list[np.ndarray]:
    """The batches that could be read in ``seconds``, one at least."""
    kept, started = [], time.perf_counter()
    for batch in batches:
        read(batch)
        kept.append(batch)
        if time.perf_counter() - started >= seconds:
            break
    return kept


def _fit_batch(read: Callable[[np.ndarray], Any], layout: Layout, batch_size: int, seconds: float) -> int:
    """A smaller batch where the asked one would take much longer than there is: chunks of 100 MB do that."""
    read(np.array([0]))  # opens the file
    started = time.perf_counter()
    read(np.array([layout.n_rows // 2]))
    row_s = time.perf_counter() - started
    return max(1, min(batch_size, int(4 * seconds / row_s)))


def _run(
    access: str,
    read: Callable[[np.ndarray], Any],
    batches: Iterator[np.ndarray],
    seconds: float,
    most_rows: int | None,
) -> Rate:
    """Read for ``seconds``, and no more rows than ``most_rows``: a second time they would come from memory."""
    n_rows, largest, started = 0, 0, time.perf_counter()
    marks = [(0, 0.0)]  # rows and seconds at the end of each part
    part_s, part_rows = seconds / _N_PARTS, math.inf if most_rows is None else most_rows / _N_PARTS
    while True:
        batch = next(batches)
        read(batch)
        n_rows, largest = n_rows + len(batch), max(largest, len(batch))
        elapsed = time.perf_counter() - started
        is_done = elapsed >= seconds or (most_rows is not None and n_rows + len(batch) > most_rows)
        if is_done or elapsed - marks[-1][1] >= part_s or n_rows - marks[-1][0] >= part_rows:
            marks.append((n_rows, elapsed))
        if is_done:
            return Rate(
                access=access,
                rows_per_s=n_rows / elapsed,
                rows_per_s_ci95=_compute_interval(marks),
                n_rows=n_rows,
                rows_a_read=largest,
                seconds=elapsed,
            )


def _compute_interval(marks: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Over the parts between ``marks``; the last, which the end cut short, is counted with the one before it."""
    if len(marks) > 3:
        marks = [*marks[:-2], marks[-1]]
    if len(marks) < 3:
        return None
    n_rows, seconds = np.diff(np.array(marks), axis=0).T
    return compute_rate_interval(n_rows, seconds)


def read_cached_pct(layout: Layout) -> float | None:
    """Share of places of a dataset that lie in the page cache, from 256 of them; None where it cannot be told."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    size = layout.path.stat().st_size
    positions = np.random.default_rng(0).integers(0, size, _N_PROBES).tolist()
    descriptor = os.open(layout.path, os.O_RDONLY)
    try:
        if not can_tell_cached(descriptor):
            return None
        return 100 * sum(is_cached(descriptor, position) for position in positions) / _N_PROBES
    finally:
        os.close(descriptor)


def drop_cache(path: Path) -> None:
    """Ask the system to forget a file. It may keep pages that another process has mapped or written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
