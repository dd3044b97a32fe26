"""``CsvLog``: ``steps.csv`` with one row a logging interval, ``epochs.csv`` with one row a pass over a split."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import StorageError
from fulltilt.listeners._append import AppendFile
from fulltilt.listeners._held import HeldEvents
from fulltilt.records import CheckpointStarted, EpochDone, Evaluated, Event, RunEnded, RunStarted, StepsDone
from fulltilt.records.run_folder import write_atomic

STEP_COLUMNS = ("epoch", "step", "step_in_epoch", "n_steps", "n_samples", "seconds", "loss", "lr", "samples_per_s")
EPOCH_COLUMNS = ("epoch", "step", "split", "loss", "seconds", "samples_per_s", "training_seconds")


class CsvLog:
    """Rows are appended as they come, never rewritten, except once when a new metric needs a column.

    A resumed run goes on in the same files: the rows that came after its checkpoint are dropped first, so that
    every step is there once.

    Rows of steps are stored once a second and before every checkpoint; only a killed process loses some
    (``_held.py``), and the resumed run repeats those steps. What was stored by a checkpoint or by the end of the run
    is on the disk.
    """

    def __init__(self, out_dir: str | Path, *, clock: Callable[[], float] = time.monotonic):
        self._steps = Table(Path(out_dir) / "steps.csv", STEP_COLUMNS)
        self._epochs = Table(Path(out_dir) / "epochs.csv", EPOCH_COLUMNS)
        self._held = HeldEvents(clock)

    def __call__(self, event: Event) -> None:
        if not self._held.add(event):
            return
        held = self._held.take()
        try:
            self._steps.append([_step_row_of(e) for e in held if isinstance(e, StepsDone)])
        finally:  # one file that cannot be written leaves the other
            self._store(event)

    def _store(self, event: Event) -> None:
        """What an event means beside the rows of steps."""
        if isinstance(event, RunStarted):
            self._steps.drop_rows_after(event.first_step)
            self._epochs.drop_rows_after(event.first_step)
        elif isinstance(event, EpochDone):
            self._epochs.append([_row_of(event, split="train", loss=event.loss, samples_per_s=event.samples_per_s)])
        elif isinstance(event, Evaluated):
            self._epochs.append([_row_of(event, split=event.split, training_seconds=event.training_seconds)])
        elif isinstance(event, CheckpointStarted):
            self._steps.sync()
            self._epochs.sync()
        elif isinstance(event, RunEnded):
            self._steps.close()
            self._epochs.close()


def _step_row_of(event: StepsDone) -> dict[str, Any]:
    phases = {f"{phase}_ms": value for phase, value in event.phases_ms.items()}
    return {name: getattr(event, name) for name in STEP_COLUMNS} | phases


def _row_of(event: EpochDone | Evaluated, **fields: Any) -> dict[str, Any]:
    row = {"epoch": event.epoch, "step": event.step, "seconds": event.seconds, **event.metrics, **fields}
    return {name: value for name, value in row.items() if value is not None}


class Table:
    """One CSV file with a header that can grow to the right."""

    def __init__(self, path: Path, columns: tuple[str, ...]):
        self.path = path
        self._columns = list(columns)
        self._file = AppendFile(path)
        self._is_started = False

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        if not self._is_started:
            self._start()
        new = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in self._columns]
        if new:
            self._widen(new)
        self._file.append(_format_lines([_list_values(row, self._columns) for row in rows]))

    def drop_rows_after(self, step: int) -> None:
        """Keep the whole rows up to ``step``. The file is replaced only when something has to go."""
        self.close()
        text = _read_text(self.path)
        header, rows = _parse(text)
        kept = [row for row in rows if _step_of(row) <= step]
        if header and text != _format_table(header, kept):
            write_atomic(self.path, _format_table(header, kept))

    def read_rows(self) -> list[dict[str, str]]:
        """The whole rows in the file."""
        return _parse(_read_text(self.path))[1]

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        """End with every row on the disk."""
        try:
            self._file.sync()
        finally:
            self._file.close()
            self._is_started = False

    def _start(self) -> None:
        header, _ = _parse(_read_text(self.path))
        if header:
            self._columns = header
        else:
            self._file.append(_format_lines([self._columns]))
        self._is_started = True

    def _widen(self, new: list[str]) -> None:
        self._file.close()
        _, rows = _parse(_read_text(self.path))
        self._columns = [*self._columns, *new]
        write_atomic(self.path, _format_table(self._columns, rows))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"{path} cannot be written: it cannot be read ({error.strerror})") from error


def _parse(text: str) -> tuple[list[str], list[dict[str, str]]]:
    """Header and whole rows; a torn last line is left out."""
    whole = text[: text.rfind("\n") + 1]
    lines = list(csv.reader(io.StringIO(whole)))
    if not lines:
        return [], []
    return lines[0], [dict(zip(lines[0], line, strict=False)) for line in lines[1:] if line]


def _format_table(header: list[str], rows: list[dict[str, str]]) -> str:
    return "".join(f"{line}\n" for line in _format_lines([header, *(_list_values(row, header) for row in rows)]))


def _list_values(row: Mapping[str, Any], columns: Iterable[str]) -> list[Any]:
    return [row.get(name, "") for name in columns]


def _format_lines(rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = _Lines()
    csv.writer(lines, lineterminator="").writerows(rows)  # None becomes an empty field
    return lines


class _Lines(list[str]):
    """What csv.writer needs of a file; a value may hold a line break, so lines cannot be split from a text."""

    write = list.append


def _step_of(row: Mapping[str, str]) -> float:
    """The row's step; a row without one belongs to no step and comes after all."""
    try:
        return int(row["step"])
    except (KeyError, ValueError):
        return float("inf")
