"""Measure how fast the rows of an HDF5 file can be read, and advise on a faster layout."""

import dataclasses
import itertools
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.data.tables.hdf5_file import find_dataset, list_datasets, list_links, open_hdf5
from fulltilt.data.tables.hdf5_layout import Layout, describe_layout
from fulltilt.data.tables.hdf5_mapped import MappedRows
from fulltilt.data.tables.hdf5_rates import ACCESSES, Rate, measure_rate, measure_warm_rate, read_cached_pct
from fulltilt.data.tables.hdf5_repack import check_references, find_largest, find_tables
from fulltilt.data.tables.hdf5_rows import DirectRows, LibraryRows, Rows, build_rows
from fulltilt.errors import DataError, UsageError
from fulltilt.records import format_bytes

SMALL_BYTES = 64 << 20  # what last-level caches hold: 8 to 64 MiB on most machines, more on some servers
SAMPLE_BYTES = 2 * SMALL_BYTES  # repacked to see what repacking is worth: out of memory, as the whole would be read
_WORTH = 1.5  # a repack is recommended when the sample came out so much faster
_READERS: dict[type, str] = {MappedRows: "mapped", DirectRows: "pread", LibraryRows: "h5py"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """Holds the layout and rates of one dataset. What was not measured is None, with a reason in ``null_reasons``.

    Attributes:
        reader: What reads its rows here: ``mapped`` (gathered out of the mapped file), ``pread`` (one array on a
            network file system) or ``h5py``.
        read_bytes_a_row: Bytes read for one row, where only whole chunks can be read.
        cached_before_pct: Share of the dataset in the page cache before the measurement.
        warm_random_rows_per_s: Random rows out of the page cache, to compare the repacked sample with.
        repacked_random_rows_per_s: The same on a sample repacked as advised, in the folder for temporary files.
        caveat: Why the rates say little: less than ``SMALL_BYTES`` were read over and over.
        command: The repack that was tried, for all datasets at once; None where it does not help or cannot be.
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
    warm_random_rows_per_s: float | None = None
    warm_random_rows_per_s_ci95: tuple[float, float] | None = None
    repacked_random_rows_per_s: float | None = None
    repacked_random_rows_per_s_ci95: tuple[float, float] | None = None
    repacked_sample_rows: int | None = None
    caveat: str | None = None
    advice: str | None = None
    command: str | None = None
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspection:
    """Reports a file's datasets with rows; ``is_cold``: the page cache was dropped before each of ``rates``."""

    path: str
    file_bytes: int
    batch_size: int
    is_cold: bool
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

    Cost: four measurements of ``seconds`` each per measured dataset; where repacking may help, four times ``seconds``
    more and a sample of 128 MiB (one chunk's rows where those are more) in the folder for temporary files.

    Args:
        batch_size: Rows read at a time.
        seconds: For each measurement; one batch at least.
        cold: Ask the system to drop the file from its page cache before each measurement.
        progress: Called with what is being done.

    Raises:
        DataError: The file or a dataset cannot be read.
        UsageError: ``batch_size`` is not positive.
    """
    path, tell = Path(path), progress or (lambda _: None)
    if batch_size < 1:
        raise UsageError(f"batch_size {batch_size} must be 1 or more")
    with open_hdf5(path) as file:
        items, asked = _find_items(path, file, names)
        layouts = [(describe_layout(path, item), item.id.get_storage_size()) for item in items]
        n_sample_rows, refusal = _plan_repack(path, file)
        links = list_links(file).values()
    if not layouts:
        remedy = "; put there what a link leads to, or inspect that file" if links else "; there is nothing to inspect"
        raise DataError(f"{path} holds no dataset with rows{''.join(f', and {link}' for link in links)}{remedy}")
    largest = max((layout for layout, _ in layouts), key=lambda layout: (layout.is_numeric, layout.n_bytes))
    reports, slow = [], []
    for layout, stored_bytes in layouts:
        report, is_slow = _describe(layout, stored_bytes), False
        if layout.name in (asked or {largest.name}):
            report, is_slow = _measure(report, layout, min(batch_size, layout.n_rows), seconds, cold, tell)
        reports.append(report)
        slow += [report] if is_slow else []
    command = None if refusal else _write_command(path, [r.name for r in slow if r.shape[0] != n_sample_rows])
    for report in slow:
        advice = f"{report.advice}; yet {refusal}" if refusal else report.advice
        reports[reports.index(report)] = dataclasses.replace(report, command=command, advice=advice)
    return Inspection(
        path=str(path),
        file_bytes=path.stat().st_size,
        batch_size=batch_size,
        is_cold=cold,
        datasets=tuple(reports),
    )


def _find_items(path: Path, file: Any, names: Sequence[str]) -> tuple[list[Any], set[str]]:
    """Return every dataset with rows, and the names in the file of those asked for, perhaps by a link."""
    wanted = [(name, find_dataset(path, file, name)) for name in names]
    found = [item for item in list_datasets(file).values() if item.shape and item.size]
    for name, item in wanted:
        if item.file != file:
            raise DataError(f"{path}: {name} is a link to {item.name} in {item.file.filename}; inspect that file")
        if item not in found:
            raise DataError(f"{path}: {name} has shape {item.shape} and so no rows to measure; name another dataset")
    return found, {item.name for item in found if any(item == other for _, other in wanted)}


def _plan_repack(path: Path, file: Any) -> tuple[int, str | None]:
    """Return the row count of datasets that a repack takes by default, and why it would refuse the file."""
    found = find_tables(file)
    try:
        check_references(path, file)
        return find_largest(path, found).shape[0], None
    except DataError as error:
        return 0, str(error)


def _write_command(path: Path, further: Sequence[str]) -> str:
    """Write the command that repacks into a new file; ``further`` datasets have to be named in it."""
    ends = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    outs = (path.with_name(f"{path.stem}.repacked{end}{path.suffix}") for end in ends)
    out = next(out for out in outs if not out.exists())
    words = ["fulltilt", "data", "repack", str(path), str(out), *(["--dataset", *further] if further else [])]
    return shlex.join(words)


def _describe(layout: Layout, stored_bytes: int) -> DatasetReport:
    alike = ("shape", "chunks", "filters", "row_bytes", "chunk_rows", "n_chunks_a_row", "n_bytes")
    return DatasetReport(
        name=layout.name.lstrip("/"),
        dtype=str(layout.dtype),
        stored_bytes=stored_bytes,
        null_reasons={"rates": "not measured: name it with --dataset"},
        **{name: getattr(layout, name) for name in alike},
    )


def _measure(
    report: DatasetReport, layout: Layout, batch_size: int, seconds: float, cold: bool, tell: Callable[[str], None]
) -> tuple[DatasetReport, bool]:
    """Return the report with rates and advice, and whether a repack is worth it."""
    if not layout.is_numeric:
        kind = "values of variable length (text, or rows of unlike length)" if layout.dtype.hasobject else layout.dtype
        reason = f"it holds {kind}, no numbers in rows of one size to train on"
        advice = f"its reading was not measured: {reason}; name another dataset with --dataset"
        return dataclasses.replace(report, advice=advice, null_reasons={"rates": reason}), False
    rows = build_rows(layout)
    reader = _READERS[type(rows)]
    cached_pct = read_cached_pct(layout)
    reasons = {} if cached_pct is not None else {"cached_before_pct": "this file system does not tell"}
    caveat = (
        f"{format_bytes(layout.n_bytes)} are less than {format_bytes(SMALL_BYTES)}, and may be read out of the "
        "processor's cache: these figures say nothing of a disk, nor of memory, nor of a larger file"
    )
    rates = {}
    for access in ACCESSES:
        tell(f"{report.name}: {access} rows")
        rates[f"rates.{access}.rows_per_s"] = measure_rate(access, layout, rows, batch_size, seconds, cold)
    report = dataclasses.replace(
        report,
        reader=reader,
        read_bytes_a_row=layout.read_bytes_a_row if reader == "h5py" else layout.row_bytes,
        cached_before_pct=cached_pct,
        rates=tuple(rates.values()),
        caveat=None if cold or layout.n_bytes >= SMALL_BYTES else caveat,
        null_reasons=reasons | _explain_intervals(rates, seconds),
    )
    tell(f"{report.name}: a repacked sample beside the rows as they are, both warm")
    return _advise(report, layout, rows, batch_size, seconds)


def _explain_intervals(rates: Mapping[str, Rate], seconds: float) -> dict[str, str]:
    """Say for each rate without an interval why it has none."""
    return {
        f"{name}_ci95": (
            "too few reads in the time given: --seconds gives more"
            if rate.seconds >= seconds
            else "the dataset was read to its end in too few reads: a smaller --batch-size gives more"
        )
        for name, rate in rates.items()
        if rate.rows_per_s_ci95 is None
    }


def _advise(
    report: DatasetReport, layout: Layout, rows: Rows, batch_size: int, seconds: float
) -> tuple[DatasetReport, bool]:
    """Compare a repacked sample with the rows as they are: both warm, and as many rows at a time."""
    if report.reader != "h5py" and report.n_chunks_a_row == 1:
        advice = "every row is one piece of the file: nothing to repack"
        reasons = dict.fromkeys(("warm_random_rows_per_s", "repacked_random_rows_per_s"), advice)
        return dataclasses.replace(report, advice=advice, null_reasons=report.null_reasons | reasons), False
    sample_rows = min(layout.n_rows, layout.count_rows_in(SAMPLE_BYTES))
    warm = measure_warm_rate(layout, rows, min(batch_size, sample_rows), seconds)
    repacked = _measure_repacked(layout, rows.read(np.arange(sample_rows)), warm.rows_a_read, seconds)
    compared = {"warm_random_rows_per_s": warm, "repacked_random_rows_per_s": repacked}
    report = dataclasses.replace(
        report,
        null_reasons=report.null_reasons | _explain_intervals(compared, seconds),
        warm_random_rows_per_s=warm.rows_per_s,
        warm_random_rows_per_s_ci95=warm.rows_per_s_ci95,
        repacked_random_rows_per_s=repacked.rows_per_s,
        repacked_random_rows_per_s_ci95=repacked.rows_per_s_ci95,
        repacked_sample_rows=sample_rows,
    )
    why, gain = _explain(report), repacked.rows_per_s / warm.rows_per_s
    rates = f"both warm, out of the page cache, {warm.rows_a_read:,} at a time: {warm} → {repacked} random rows/s"
    if gain < _WORTH:
        advice = (
            f"{why}, yet a sample of {sample_rows:,} rows repacked is no {_WORTH:g} times as fast ({rates}): leave it"
        )
        return dataclasses.replace(report, advice=advice), False
    if layout.n_bytes < SMALL_BYTES:
        faster = (
            f"its rows were read faster ({rates}); how many times as fast cannot be told from less than "
            f"{format_bytes(SMALL_BYTES)}, which the processor's cache may hold"
        )
    else:
        factor = f"{gain:,.{0 if gain >= 10 else 1}f} times as fast"
        faster = f"a sample of {sample_rows:,} rows was read {factor} ({rates})"
    advice = f"{why}. Written as one array without chunks, {faster}; {format_bytes(layout.n_bytes)} on disk then"
    return dataclasses.replace(report, advice=advice), True


def _explain(report: DatasetReport) -> str:
    parts = []
    if report.filters:
        ratio = (report.read_bytes_a_row or 0) / report.row_bytes
        parts.append(f"a row takes {ratio:,.0f} times its bytes through {' + '.join(report.filters)}")
    if report.n_chunks_a_row > 1:
        parts.append(f"a row is cut over {report.n_chunks_a_row:,} chunks")
    return " and ".join(parts) or "rows have to go through h5py"


def _measure_repacked(layout: Layout, sample: np.ndarray, batch_size: int, seconds: float) -> Rate:
    import h5py

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.h5"
        with h5py.File(path, "w") as file:
            file["sample"] = sample
            found = describe_layout(path, file["sample"])
        return measure_warm_rate(found, build_rows(found, sample_of=layout), batch_size, seconds)
