"""``CsvLog``: ``steps.csv`` with one row a logging interval, ``epochs.csv`` with one row a pass over a split."""

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
    """Appends rows as they come, and rewrites them only when a new metric needs a column.

    A resumed run goes on in the same files: the rows that came after its checkpoint are dropped first, so that every
    step is there once. Rows of steps are stored once a second (``_held.py``); what a checkpoint counts on is on the
    disk before it. Epochs count from 1.
    """

    def __init__(self, out_dir: str | Path, *, clock: Callable[[], float] = time.monotonic):
        self._steps = Table(Path(out_dir) / "steps.csv", STEP_COLUMNS)
        self._epochs = Table(Path(out_dir) / "epochs.csv", EPOCH_COLUMNS)
        self._held = HeldEvents(clock)

    def __call__(self, event: Event) -> None:
        due = self._held.add(event)
        try:
            self._steps.append([_build_step_row(e) for e in due if isinstance(e, StepsDone)])
        finally:  # one file that cannot be written leaves the other
            self._store(event)

    def _store(self, event: Event) -> None:
        """Store what an event means beside the rows of steps."""
        if isinstance(event, EpochDone):
            fields = {"split": "train", "loss": event.loss, "samples_per_s": event.samples_per_s}
            self._epochs.append([_build_row(event, fields)])
        elif isinstance(event, Evaluated):
            fields = {"split": event.split, "training_seconds": event.training_seconds}
            self._epochs.append([_build_row(event, fields)])
        for table in (self._steps, self._epochs):
            table.follow(event)


def _build_step_row(event: StepsDone) -> dict[str, Any]:
    phases = {f"{phase}_ms": value for phase, value in event.phases_ms.items()}
    return {name: getattr(event, name) for name in STEP_COLUMNS} | phases


def _build_row(event: EpochDone | Evaluated, fields: Mapping[str, Any]) -> dict[str, Any]:
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
            header, _ = self._read()
            if not header:
                self._file.append(_format_lines([self._columns]))
            self._columns, self._is_started = header or self._columns, True
        new = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in self._columns]
        if new:
            self._file.close()
            _, old_rows = self._read()
            self._columns = [*self._columns, *new]
            write_atomic(self.path, format_table(self._columns, old_rows))
        self._file.append(_format_lines(_list_values(rows, self._columns)))

    def follow(self, event: Event) -> None:
        """Drop rows after the first step of a run that starts; sync before a checkpoint; sync and close at the end."""
        if isinstance(event, RunStarted):
            self._close()
            header, rows = self._read()
            kept = [row for row in rows if _read_step(row) <= event.first_step]
            if header and _read_text(self.path) != (text := format_table(header, kept)):
                write_atomic(self.path, text)
        elif isinstance(event, CheckpointStarted):
            self._file.sync()
        elif isinstance(event, RunEnded):
            self._close()

    def read_rows(self) -> list[dict[str, str]]:
        """Read the whole rows in the file."""
        return self._read()[1]

    def _close(self) -> None:
        try:
            self._file.sync()
        finally:
            self._file.close()
            self._is_started = False

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Read header and whole rows; a torn last line is left out."""
        text = _read_text(self.path)
        lines = list(csv.reader(io.StringIO(text[: text.rfind("\n") + 1])))
        header = lines[0] if lines else []
        return header, [dict(zip(header, line, strict=False)) for line in lines[1:] if line]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise StorageError(f"{path} cannot be written: it cannot be read ({error.strerror})") from error


def format_table(header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Write a whole file: the header, and of each row the values that the header names."""
    return "".join(f"{line}\n" for line in _format_lines([header, *_list_values(rows, header)]))


def _list_values(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> list[list[Any]]:
    return [[row.get(name, "") for name in columns] for row in rows]


def _format_lines(rows: Iterable[Sequence[Any]]) -> list[str]:
    lines = _Lines()
    csv.writer(lines, lineterminator="").writerows(rows)  # None becomes an empty field
    return lines


class _Lines(list[str]):
    """What csv.writer needs of a file; a value may hold a line break, so lines cannot be split from a text."""

    write = list.append


def _read_step(row: Mapping[str, str]) -> float:
    """Read the row's step; a row without one belongs to no step and comes after all."""
    try:
        return int(row["step"])
    except (KeyError, ValueError):
        return float("inf")
