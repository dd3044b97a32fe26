"""Write a run's speed, losses and accuracy as CSV files, as guide 004 (``docs/guides.md``) names them."""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.hardware import read_rss_bytes
from fulltilt.listeners._held import HeldEvents
from fulltilt.listeners.csv_log import Table, format_table
from fulltilt.records import EpochDone, Evaluated, Event, RunEnded, RunStarted, StepsDone
from fulltilt.records.run_folder import append_line, read_lines, write_atomic

EFFICIENCY = ("epoch", "step", "timestamp", "n_samples", "n_batches", "seconds", "throughput")
EFFICIENCY += ("memory_per_sample", "forward_time")
FIGURES = {
    "total_loss": "loss",
    "forward_loss": "forward_loss",
    "backward_loss": "backward_loss",
    "accuracy": "accuracy",
    "top5_accuracy": "top5",
    "perplexity": "perplexity",
}
"""Columns of ``training_metrics.csv`` that are a metric of a pass → its name."""
TRAINING = ("epoch", "step", "timestamp", "split", *FIGURES, "epoch_time", "memory_gib")
ERRORS = ("epoch", "step", "category", "share_pct", "error_pct")
SUMMARY = ("metric", "mean", "std", "total_samples", "total_batches", "unit", "note")
OWNER = "run.txt"

THROUGHPUT_NOTE = "samples over seconds of training; std over logging intervals, weighted by their length"
CPU_MEMORY_NOTE = "resident set of the training process over the batch size"
CUDA_MEMORY_NOTE = "peak of allocated device memory over the batch size"
NO_MEMORY_NOTE = (
    "the run trained in processes of its own (several devices, run.max_restarts, or memory ran out); theirs is not read"
)
FORWARD_NOTE = "forward pass and loss of one step a logging interval"
NO_FORWARD_NOTE = "the run did not time the phases of its steps"


@dataclasses.dataclass(slots=True)
class Spread:
    """Updates a weighted mean and standard deviation without keeping the values (West 1979)."""

    weight: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float, weight: float) -> None:
        if weight <= 0:
            return
        self.weight += weight
        change = value - self.mean
        self.mean += change * weight / self.weight
        # Never below zero but by rounding: of one value the new mean may miss it by the last bit.
        self.squares += max(0.0, weight * change * (value - self.mean))

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.weight) if self.weight else 0.0


def read_memory_bytes(device: str) -> int | None:
    """Read this process's peak of allocated memory on a GPU, or its resident set on a CPU."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.max_memory_allocated(device)
    return read_rss_bytes(os.getpid())


class MetricsTracker:
    """Writes five CSV files into ``folder``; units: seconds, samples/s, MiB, ms. Epochs count from 1.

    - ``efficiency_metrics.csv``: a row a logging interval, only ever appended.
    - ``training_metrics.csv``: a row for each pass over a split; ``error_analysis.csv``: its errors by group of words,
      from metrics named ``error_pct/…`` and ``share/…``.
    - ``efficiency_summary.csv``, ``training_summary.csv``: written anew after each pass and at the end, from running
      sums. Best and final figures are those of validation where there is one.

    Rows are stored once a second and before every checkpoint; a killed process loses what came since, and a resumed
    run goes on where its checkpoint is (``CsvLog`` does the same). The folder belongs to one run.

    Args:
        clock: Seconds from any start.
        read_memory: Device ("cpu", "cuda:0") → bytes in use by this process. Not asked where another one trains.

    Raises:
        UsageError: the folder holds the metrics of another run.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        read_memory: Callable[[str], int | None] = read_memory_bytes,
    ):
        self._folder = Path(folder)
        self._efficiency = Table(self._folder / "efficiency_metrics.csv", EFFICIENCY)
        self._training = Table(self._folder / "training_metrics.csv", TRAINING)
        self._errors = Table(self._folder / "error_analysis.csv", ERRORS)
        self._held = HeldEvents(clock)
        self._rows: list[dict[str, Any]] = []
        self._read_memory = read_memory
        self._device, self._batch_size, self._trains_here = "cpu", 1, True
        self._is_mine = False  # until the folder is known to be this run's
        self._start_sums()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepsDone):  # memory is that of now; rows are stored later
            self._rows.append(row := self._build_efficiency_row(event))
            self._add(row)
        if not self._held.add(event):
            return
        rows, self._rows = self._rows, []
        try:
            self._efficiency.append(rows)
        finally:  # rows that cannot be written leave the other files
            self._store(event)

    def _store(self, event: Event) -> None:
        """Store what an event means beside the rows of logging intervals."""
        if isinstance(event, RunStarted):
            self._claim(event)
        if isinstance(event, EpochDone) and self._is_mine:
            self._store_pass(event, "train", {"loss": event.loss, **event.metrics})
        elif isinstance(event, Evaluated) and self._is_mine:
            self._store_pass(event, event.split, event.metrics)
        elif isinstance(event, RunEnded) and self._is_mine:
            self._write_summaries()
        for table in (self._efficiency, self._training, self._errors):
            table.follow(event)
        if isinstance(event, RunStarted):
            self._start_sums()
            for row in self._efficiency.read_rows():
                self._add({name: float(value) for name, value in row.items() if value})
            self._passes = [*self._training.read_rows()]

    def _claim(self, event: RunStarted) -> None:
        """Make the folder this run's, and note how the run trains."""
        owner = self._folder / OWNER
        name = str(Path(event.out_dir).resolve())
        if not owner.is_file():
            append_line(owner, name)
        found = read_lines(owner)[0]  # of two runs that start at once, the one whose line came first
        if found != name:
            raise UsageError(
                f"{self._folder} holds the metrics of the run in {found}; give another folder with --metrics, "
                "or remove this one"
            )
        self._is_mine = True
        self._device, self._batch_size = event.device, event.plan["batch_size"]
        self._trains_here = event.n_ranks == 1 and event.pid in (None, os.getpid())

    def _start_sums(self) -> None:
        self._n_samples = self._n_batches = 0
        self._spreads = {name: Spread() for name in ("throughput", "memory_per_sample", "forward_time")}
        self._passes: list[Mapping[str, Any]] = []

    def _find_memory(self, unit_bytes: float) -> float | None:
        n_bytes = self._read_memory(self._device) if self._trains_here else None
        return None if n_bytes is None else n_bytes / unit_bytes

    def _build_efficiency_row(self, event: StepsDone) -> dict[str, Any]:
        n_batches = -(-event.n_samples // self._batch_size)
        values = (event.epoch, event.step, event.time_s, event.n_samples, n_batches, event.seconds)
        memory_mib = self._find_memory(2**20 * self._batch_size)
        values += (event.samples_per_s, memory_mib, event.phases_ms.get("forward"))
        return dict(zip(EFFICIENCY, values, strict=True))

    def _add(self, row: Mapping[str, Any]) -> None:
        self._n_samples += int(row["n_samples"])
        self._n_batches += int(row["n_batches"])
        for name, spread in self._spreads.items():
            if row.get(name) is not None:
                spread.add(row[name], row["seconds"] if name == "throughput" else row["n_batches"])

    def _store_pass(self, event: EpochDone | Evaluated, split: str, metrics: Mapping[str, float]) -> None:
        figures = [metrics.get(name) for name in FIGURES.values()]
        values = (event.epoch, event.step, event.time_s, split, *figures, event.seconds, self._find_memory(2**30))
        row = dict(zip(TRAINING, values, strict=True))
        self._training.append([row])
        self._passes.append(row)
        if split != "train":
            for name, error_pct in metrics.items():
                if (group := name.removeprefix("error_pct/")) != name:
                    share_pct = 100 * metrics.get(f"share/{group}", math.nan)
                    values = (event.epoch, event.step, group, share_pct, error_pct)
                    self._errors.append([dict(zip(ERRORS, values, strict=True))])
        self._write_summaries()

    def _write_summaries(self) -> None:
        memory_note = CUDA_MEMORY_NOTE if self._device.startswith("cuda") else CPU_MEMORY_NOTE
        has_memory = self._trains_here or self._spreads["memory_per_sample"].weight
        notes = {
            "throughput": ("samples/s", THROUGHPUT_NOTE),
            "memory_per_sample": ("MiB", memory_note if has_memory else NO_MEMORY_NOTE),
            "forward_time": ("ms", FORWARD_NOTE if self._spreads["forward_time"].weight else NO_FORWARD_NOTE),
        }
        rows = []
        for name, s in self._spreads.items():
            figures = (s.mean, s.std) if s.weight else ("", "")
            row = (name, *figures, self._n_samples, self._n_batches, *notes[name])
            rows.append(dict(zip(SUMMARY, row, strict=True)))
        summary = summarize_passes(self._passes)
        write_atomic(self._folder / "efficiency_summary.csv", format_table(SUMMARY, rows))
        write_atomic(self._folder / "training_summary.csv", format_table(list(summary), [summary]))


def summarize_passes(passes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the row of ``training_summary.csv``; ``split`` is the one whose best and final figures it gives."""
    times = [float(row["epoch_time"]) for row in passes if row["split"] == "train"]
    split = "val" if any(row["split"] == "val" for row in passes) else "train"
    summary: dict[str, Any] = {"total_epochs": len(times)}
    for column, best in (("total_loss", min), ("accuracy", max), ("perplexity", min)):
        values = [float(row[column]) for row in passes if row["split"] == split and row[column] not in (None, "")]
        name = FIGURES[column]
        summary[f"best_{name}"] = best(values) if values else None
        summary[f"final_{name}"] = values[-1] if values else None
    summary["avg_epoch_time"] = sum(times) / len(times) if times else None
    summary["total_training_time"] = sum(times)
    return {**summary, "split": split}
