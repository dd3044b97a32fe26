"""How fast the rows of an HDF5 file can be read, measured, and what to do about it."""

from __future__ import annotations

import dataclasses
import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.hdf5_file import find_dataset, open_hdf5
from fulltilt.data.hdf5_layout import Layout, describe_layout
from fulltilt.data.hdf5_rates import ACCESSES, Rate, measure_rate, read_cached_pct
from fulltilt.data.hdf5_rows import Rows, build_rows
from fulltilt.errors import DataError, UsageError

SAMPLE_BYTES = 32 << 20  # repacked to see what repacking is worth
_WORTH = 1.5  # a repack is recommended when the sample came out so much faster


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """One dataset. What was not measured is None, with the reason in ``null_reasons``.

    Attributes:
        reader: ``mapped`` (rows gathered out of the mapped file) or ``h5py``.
        read_bytes_a_row: What one row takes out of the file where whole chunks have to be read for it.
        cached_before_pct: Share of the dataset that lay in the page cache before; None where it cannot be told.
        rates: Per way of reading.
        repacked_random_rows_per_s: The same on a sample that was repacked as advised.
        advice: What to do, in words.
        command: The repack that was tried, None when the file is fine.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...] | None
    filters: tuple[str, ...]
    row_bytes: int
    chunk_rows: int | None
    n_chunks_a_row: int
    n_bytes: int
    stored_bytes: int
    reader: str | None = None
    read_bytes_a_row: int | None = None
    cached_before_pct: float | None = None
    rates: tuple[Rate, ...] = ()
    repacked_random_rows_per_s: float | None = None
    repacked_sample_rows: int | None = None
    advice: str | None = None
    command: str | None = None
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    def get_rate(self, access: str) -> float | None:
        return next((rate.rows_per_s for rate in self.rates if rate.access == access), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    path: str
    file_bytes: int
    batch_size: int
    is_cold: bool  # the page cache was asked to forget the file before each measurement
    datasets: tuple[DatasetReport, ...]
    version: int = 1


def inspect_hdf5(
    path: str | Path,
    names: Sequence[str] = (),
    *,
    batch_size: int = 256,
    seconds: float = 1.0,
    cold: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Inspection:
    """Describe every dataset of a file, and measure the named ones; the largest when none is named.

    Cost: four measurements of ``seconds`` each per measured dataset, a repacked sample of 32 MiB where that may help.

    Args:
        path: The file.
        names: Datasets to measure.
        batch_size: Rows read at a time.
        seconds: For each measurement; one batch at least.
        cold: Ask the system to drop the file from its page cache before each measurement.
        progress: Called with what is being done.

    Raises:
        DataError: The file or a dataset cannot be read.
        UsageError: ``batch_size`` is not positive.
    """
    path = Path(path)
    if batch_size < 1:
        raise UsageError(f"batch_size {batch_size} must be 1 or more")
    with open_hdf5(path) as file:
        layouts = [(describe_layout(path, item), item.id.get_storage_size()) for item in _find_items(path, file, names)]
    if not layouts:
        raise DataError(f"{path} holds no dataset with rows; there is nothing to inspect")
    largest = max((layout for layout, _ in layouts), key=lambda layout: layout.n_bytes)
    measured = {largest.name} if not names else {f"/{name.lstrip('/')}" for name in names}
    reports = []
    for layout, stored_bytes in layouts:
        report = _describe(layout, stored_bytes)
        if layout.name in measured:
            report = _measure(
                report, layout, min(batch_size, layout.n_rows), seconds, cold, progress or (lambda _: None)
            )
        reports.append(report)
    return Inspection(
        path=str(path),
        file_bytes=path.stat().st_size,
        batch_size=batch_size,
        is_cold=cold,
        datasets=tuple(reports),
    )


def _find_items(path: Path, file: Any, names: Sequence[str]) -> list[Any]:
    import h5py

    for name in names:
        find_dataset(path, file, name)
    found: list[Any] = []

    def visit(_: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.shape and item.size:
            found.append(item)

    file.visititems(visit)
    return found


def _describe(layout: Layout, stored_bytes: int) -> DatasetReport:
    return DatasetReport(
        name=layout.name.lstrip("/"),
        shape=layout.shape,
        dtype=str(layout.dtype),
        chunks=layout.chunks,
        filters=layout.filters,
        row_bytes=layout.row_bytes,
        chunk_rows=layout.chunk_rows,
        n_chunks_a_row=layout.n_chunks_a_row,
        n_bytes=layout.n_bytes,
        stored_bytes=stored_bytes,
        null_reasons={"rates": "not measured: name it with --dataset"},
    )


def _measure(
    report: DatasetReport, layout: Layout, batch_size: int, seconds: float, cold: bool, tell: Callable[[str], None]
) -> DatasetReport:
    if layout.dtype.kind not in "iufb":
        return dataclasses.replace(report, null_reasons={"rates": f"{layout.dtype} is no number to train on"})
    rows = build_rows(layout)
    is_direct = layout.offset is not None or layout.has_plain_chunks
    cached_pct = read_cached_pct(layout)
    rates = []
    for access in ACCESSES:
        tell(f"{report.name}: {access} rows")
        rates.append(measure_rate(access, layout, rows, batch_size, seconds, cold))
    report = dataclasses.replace(
        report,
        reader="mapped" if is_direct else "h5py",
        read_bytes_a_row=layout.row_bytes if is_direct else layout.read_bytes_a_row,
        cached_before_pct=cached_pct,
        rates=tuple(rates),
        null_reasons={} if cached_pct is not None else {"cached_before_pct": "this file system does not tell"},
    )
    tell(f"{report.name}: a repacked sample")
    return _advise(report, layout, rows, batch_size, seconds)


def _advise(report: DatasetReport, layout: Layout, rows: Rows, batch_size: int, seconds: float) -> DatasetReport:
    if report.reader == "mapped" and report.n_chunks_a_row == 1:
        return dataclasses.replace(report, advice="every row is one piece of the file: nothing to repack")
    sample_rows = _choose_sample(layout)
    rate = _measure_repacked(layout, rows.read(np.arange(sample_rows)), batch_size, seconds)
    before = report.get_rate("random") or 0.0
    why = _explain(report)
    if rate < _WORTH * before:
        return dataclasses.replace(
            report,
            repacked_random_rows_per_s=rate,
            repacked_sample_rows=sample_rows,
            advice=f"{why}, yet a sample of {sample_rows:,} rows repacked is no {_WORTH:g} times as fast: leave it",
        )
    out = layout.path.with_name(f"{layout.path.stem}.repacked{layout.path.suffix}")
    return dataclasses.replace(
        report,
        repacked_random_rows_per_s=rate,
        repacked_sample_rows=sample_rows,
        advice=(
            f"{why}. Written as one array without chunks, a sample of {sample_rows:,} rows gave "
            f"{rate / before:,.0f} times the random rows/s; {layout.n_bytes / 2**30:,.2f} GiB on disk then"
        ),
        command=f"fulltilt data repack {shlex.quote(str(layout.path))} {shlex.quote(str(out))}",
    )


def _explain(report: DatasetReport) -> str:
    parts = []
    if report.filters:
        ratio = (report.read_bytes_a_row or 0) / report.row_bytes
        parts.append(f"a row takes {ratio:,.0f} times its bytes through {' + '.join(report.filters)}")
    if report.n_chunks_a_row > 1:
        parts.append(f"a row is cut over {report.n_chunks_a_row:,} chunks")
    return " and ".join(parts) or "rows have to go through h5py"


def _choose_sample(layout: Layout) -> int:
    unit = layout.chunk_rows or 1
    return min(layout.n_rows, max(1, SAMPLE_BYTES // max(1, unit * layout.row_bytes)) * unit)


def _measure_repacked(layout: Layout, sample: np.ndarray, batch_size: int, seconds: float) -> float:
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.h5"
        with h5py.File(path, "w") as file:
            file["sample"] = sample
            found = describe_layout(path, file["sample"])
        rows = build_rows(found)
        rows.read(np.arange(found.n_rows))
        return measure_rate("random", found, rows, min(batch_size, found.n_rows), seconds, False).rows_per_s
