"""Build the table of trials: one source of cells for the terminal and for the page."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import BUSY_PCT, format_rate, is_busy_pressure

Row = Mapping[str, Any]  # a trial as the JSON contract has it

SHORT_NAMES = {
    "batch_size": "batch",
    "accumulate": "accum.",
    "num_workers": "workers",
    "pin_memory": "pin",
    "persistent_workers": "persist.",
    "prefetch_factor": "prefetch",
    "worker_threads": "w.threads",
    "fused_optimizer": "fused",
    "retain_freed_memory": "retain",
    "cudnn_benchmark": "cudnn b.",
    "wait_policy": "wait",
    "activation_checkpointing": "act. ckpt",
}
BUSY_MARK = "*"
WIDE = 140  # columns of a terminal that shows every phase
_ALWAYS_SHOWN = ("batch_size", "num_workers", "precision")
_STATUS = {"ok": "ok", "out_of_memory": "OOM", "timeout": "timeout", "error": "error", "skipped": "skipped"}
_PHASE_TITLES = {
    "data_wait": "data ms",
    "h2d": "h2d ms",
    "forward": "fwd ms",
    "backward": "bwd ms",
    "optimizer": "opt ms",
    "other": "other ms",
    "step": "step ms",
}
TELLING_PCT = 100.0  # half an interval wider than this says only that nothing is known


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table.

    Attributes:
        tip: What a page shows when the cell is pointed at.
    """

    title: str
    cell: Callable[[Row], str]
    is_number: bool = True
    tip: Callable[[Row], str] = lambda row: ""


def select_levers(rows: Sequence[Row]) -> list[str]:
    """Select the levers worth a column: those that vary over the rows, and the three everyone asks for."""
    shown = []
    for name in load_catalogue():
        values = {repr(row["plan"].get(name)) for row in rows}
        if len(values) > 1 or (name in _ALWAYS_SHOWN and values):
            shown.append(name)
    return sorted(shown, key=lambda name: (name not in _ALWAYS_SHOWN, name != "batch_size"))


def build_columns(rows: Sequence[Row], *, is_narrow: bool = False) -> list[Column]:
    """Build the columns of the trial table, without those that no row has a figure for.

    A narrow table keeps data wait and step of the phases: cut-off figures help nobody.
    """
    columns = [
        Column(title=SHORT_NAMES.get(name, name), cell=lambda row, n=name: format_value(row["plan"].get(n)))
        for name in select_levers(rows)
    ]
    for phase, title in _PHASE_TITLES.items():
        is_shown = not is_narrow or phase in ("data_wait", "step")
        if is_shown and any((row.get("phases_ms") or {}).get(phase) is not None for row in rows):
            columns.append(Column(title=title, cell=lambda row, p=phase: _ms((row.get("phases_ms") or {}).get(p))))
    columns.append(
        Column(title="samples/s", cell=lambda row: mark_busy(format_throughput(row), row), tip=describe_pressure)
    )
    if any(row.get("gpu_utilization_pct") is not None for row in rows):
        columns.append(Column(title="GPU %", cell=lambda row: _format(row.get("gpu_utilization_pct"), "{:.0f}")))
    columns.append(
        Column(
            title="memory GiB",
            cell=lambda row: _gib(read_memory_gib(row)),
            tip=lambda row: f"fullest: {part}" if (part := row.get("memory_peak_part")) else "",
        )
    )
    columns.append(Column(title="status", cell=lambda row: _STATUS[row["status"]], is_number=False))
    return columns


def read_memory_gib(row: Row) -> float | None:
    """Read the memory of the device used: reserved on a GPU, the process tree's peak on a CPU."""
    reserved = row.get("memory_reserved_peak_gib")
    return reserved if reserved is not None else row.get("memory_rss_peak_gib")


def format_throughput(row: Row) -> str:
    """Format samples/s with half the width of the 95 % interval: ``1,234 ± 2 %``."""
    value, interval = row.get("samples_per_s"), row.get("samples_per_s_ci95")
    if value is None:
        return ""
    text = format_rate(value)
    if not interval or not value:
        return text
    half_pct = 100 * (interval[1] - interval[0]) / 2 / value
    return f"{text} ± {half_pct:.1f} %" if half_pct <= TELLING_PCT else f"{text} ± more than {TELLING_PCT:.0f} %"


def is_busy(row: Row) -> bool:
    """Whether a row was measured while something else, or its own data workers, kept tasks waiting for a core."""
    return row["status"] == "ok" and is_busy_pressure(row.get("cpu_pressure_pct"))


def mark_busy(figure: str, row: Row) -> str:
    """Mark a figure in a row of a busy machine: ``1,234 ± 2.8 % *``. ``describe_busy`` explains the mark."""
    return f"{figure} {BUSY_MARK}" if figure and is_busy(row) else figure


def describe_busy(rows: Iterable[Row], *, probes: Iterable[Row] = ()) -> str | None:
    """Explain the mark under a table of ``rows``; None where no row has it.

    Args:
        probes: Parts of the step that a sentence beside it rests on.
    """
    counts = []
    for some, what in ((rows, "row"), (probes, "probe")):
        if n := sum(map(is_busy, some)):
            counts.append(f"{n} {what}{'' if n == 1 else 's'}")
    if not counts:
        return None
    return (
        f"{BUSY_MARK} a busy machine's figure ({', '.join(counts)}): some task waited for a "
        f"core more than {BUSY_PCT:.0f} % of the time, behind other programs or the row's own data workers"
    )


def describe_pressure(row: Row) -> str:
    """Say how long tasks waited for a core while the row was measured; empty where that was not read."""
    pressure_pct = row.get("cpu_pressure_pct")
    return "" if pressure_pct is None else f"some task waited for a core {pressure_pct:.0f} % of the time"


def format_value(value: Any) -> str:
    """Format a setting: ``yes``, ``no``, ``–`` for None, everything else as it is."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)


def build_trials_table(
    rows: Sequence[Row], *, marked: Mapping[str, str] | None = None, width: int | None = None
) -> Any:
    """Build a rich Table of the trials in the order they ran; ``marked``: trial id → a word behind its status."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    columns = build_columns(rows, is_narrow=width is not None and width < WIDE)
    for column in columns[:-1]:  # figures are never cut; what does not fit beside them wraps in the last column
        widest = max(len(text) for text in (*column.title.split(), *map(column.cell, rows)))
        table.add_column(column.title, justify="right" if column.is_number else "left", min_width=widest)
    table.add_column(columns[-1].title)
    styles = {"ok": "", "out_of_memory": "yellow", "skipped": "dim", "error": "red", "timeout": "red"}
    for row in rows:
        cells = [Text(column.cell(row)) for column in columns]
        note = (marked or {}).get(row["id"])
        if note:
            cells[-1] = Text(f"{cells[-1].plain} ← {note}")
        table.add_row(*cells, style="bold green" if note else styles[row["status"]])
    return table


def _format(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _ms(value: float | None) -> str:
    return _format(value, "{:.0f}" if (value or 0) >= 1000 else "{:.1f}" if (value or 0) >= 10 else "{:.2f}")


def _gib(value: float | None) -> str:
    """Format ``0.29``, and two figures of what two decimals would round to nothing."""
    return _format(value, "{:.2g}" if 0 < (value or 0) < 0.01 else "{:.2f}")
