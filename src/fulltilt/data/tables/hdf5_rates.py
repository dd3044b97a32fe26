"""Measure rows per second out of an HDF5 dataset by the order of reading, and how much of it is cached."""

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_layout import Layout
from fulltilt.data.tables.hdf5_mapped import is_cached
from fulltilt.data.tables.hdf5_rows import Rows
from fulltilt.stats import compute_rate_interval

ACCESSES = ("random", "block_shuffled", "sequential", "random_row_by_row")
_BLOCK_BYTES = 1 << 20
_N_PROBES = 256
_N_PARTS = 12  # of a measurement: the unit of replication of its interval
TELLING_PCT = 100.0  # half an interval wider than this says only that nothing is known

Read = Callable[[np.ndarray], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rate:
    """The rate of one way of reading; its interval is over parts of the measurement, None where there was one."""

    access: str  # one of ACCESSES
    rows_per_s: float
    rows_per_s_ci95: tuple[float, float] | None
    n_rows: int
    rows_a_read: int
    seconds: float

    def __str__(self) -> str:
        """Return such as ``12,345 ± 2.1 %``: half the interval's width beside the figure."""
        if self.rows_per_s_ci95 is None:
            return f"{self.rows_per_s:,.0f}"
        low, high = self.rows_per_s_ci95
        half_pct = 100 * (high - low) / 2 / self.rows_per_s
        width = f"± {half_pct:.1f} %" if half_pct <= TELLING_PCT else f"± more than {TELLING_PCT:.0f} %"
        return f"{self.rows_per_s:,.0f} {width}"


def measure_rate(access: str, layout: Layout, rows: Rows, batch_size: int, seconds: float, cold: bool) -> Rate:
    """Read batches for ``seconds``; with ``cold`` from the disk, and no row twice."""
    with contextlib.ExitStack() as stack:
        read: Read = rows.read
        if access == "random_row_by_row":  # one h5py read a row, as a Dataset written by hand does it
            import h5py

            dataset = stack.enter_context(h5py.File(layout.path, "r"))[layout.name]
            read, batch_size = (lambda rows: [dataset[row] for row in rows.tolist()]), 1
        else:
            batch_size = _fit_batch(read, layout, batch_size, seconds)
        if cold:
            drop_cache(layout.path)
        batches = _list_batches(access, np.arange(layout.n_rows), batch_size, layout.count_rows_in(_BLOCK_BYTES))
        return _run(access, read, batches, seconds, layout.n_rows if cold else None)


def measure_warm_rate(layout: Layout, rows: Rows, batch_size: int, seconds: float) -> Rate:
    """Read random batches of rows that the page cache holds, since they were read just before.

    They are drawn as ``random`` draws them: the same batches over and over were read up to a quarter faster, of a file
    of 16 MB.

    Cost: ``seconds`` at most to read them the first time, and ``seconds`` to time them.
    """
    fitting = _fit_batch(rows.read, layout, batch_size, seconds)
    kept, started = [], time.perf_counter()
    for batch in _cut(np.random.default_rng(0).permutation(layout.n_rows), fitting):
        rows.read(batch)
        kept.append(batch)
        if time.perf_counter() - started >= seconds:
            break
    batches = _list_batches("random", np.sort(np.concatenate(kept)), fitting)
    return _run("random", rows.read, batches, seconds, None)


def _list_batches(access: str, rows: np.ndarray, batch_size: int, block_rows: int = 1) -> Iterator[np.ndarray]:
    """Yield the rows of one read after the other, without end; random orders differ each time round."""
    rng = np.random.default_rng(0)
    while True:
        if access == "block_shuffled":
            for first in rng.permutation(rows[::block_rows]).tolist():
                yield rows[first : first + block_rows]
        else:
            yield from _cut(rows if access == "sequential" else rng.permutation(rows), batch_size)


def _cut(order: np.ndarray, batch_size: int) -> Iterator[np.ndarray]:
    for first in range(0, len(order) - batch_size + 1, batch_size):
        yield order[first : first + batch_size]


def _fit_batch(read: Read, layout: Layout, batch_size: int, seconds: float) -> int:
    """Lower the batch size where a batch would take much longer than ``seconds``, as with chunks of 100 MB."""
    read(np.array([0]))  # opens the file
    started = time.perf_counter()
    read(np.array([layout.n_rows // 2]))
    row_s = time.perf_counter() - started
    return max(1, min(batch_size, int(4 * seconds / row_s)))


def _run(access: str, read: Read, batches: Iterator[np.ndarray], seconds: float, most_rows: int | None) -> Rate:
    """Read for ``seconds`` or ``most_rows``, whichever comes first: cold rows are warm the second time."""
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
    """Compute the interval over the parts between ``marks``; the last one, cut short, joins the one before it."""
    if len(marks) > 3:
        marks = [*marks[:-2], marks[-1]]
    if len(marks) < 3:
        return None
    n_rows, seconds = np.diff(np.array(marks), axis=0).T
    return compute_rate_interval(n_rows, seconds)


def read_cached_pct(layout: Layout) -> float | None:
    """Read the cached share of a file from 256 random places; None where the system cannot say."""
    positions = np.random.default_rng(0).integers(0, layout.path.stat().st_size, _N_PROBES).tolist()
    with layout.path.open("rb") as stream:
        answers = [is_cached(stream.fileno(), position) for position in positions]
    return None if None in answers else 100 * sum(map(bool, answers)) / _N_PROBES


def drop_cache(path: Path) -> None:
    """Ask the system to forget a file. It may keep pages that another process has mapped or written."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
