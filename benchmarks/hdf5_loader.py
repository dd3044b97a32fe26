"""Rows per second out of HDF5 files in random order, beside a loader that reads row by row, and beside memory itself.

All arms deliver shuffled batches of 256 rows and their labels as tensors in host memory, in this process, on one
thread. ``bound`` holds the same rows in memory and gathers the batches from there with one call: no loader can do more
than move those bytes once. Arms run in turn within a round, and a ratio is taken within its round.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._hdf5_files import LAYOUTS, Rows, describe_chunks, write_file
from benchmarks._rounds import Round, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, compute_bounds, judge
from fulltilt.data import DATASETS, build_loader

NAME = "hdf5_loader"
CLAIM = (
    "Random batches out of an HDF5 file arrive over 20 times as fast as row by row, and with its rows placed in memory "
    "at the speed of a gather from there, whatever its chunks."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)

BATCH_SIZE = 256
ROWS = (
    Rows(name="5 KB rows", shape=(256, 5), n_rows=40_000),
    Rows(name="40 KB rows", shape=(2, 5120), n_rows=8_000),
)
PLACEMENTS = ("stream", "memory_map", "ram", "block_shuffled")
PER_ROW_LINK = "https://docs.h5py.org/en/stable/high/dataset.html#reading-writing-data"
LEAST_SPEEDUP, LEAST_SHARE = 20.0, 0.8

Pass = Callable[[], Iterator[object]]


class PerRow(Dataset):
    """What most people write: one sample, one read. The file stays open, which is the better way to write it."""

    def __init__(self, path: Path):
        self._path, self._file = path, None
        with h5py.File(path) as file:
            self._n_rows = len(file["input"])

    def __len__(self) -> int:
        return self._n_rows

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._file is None:
            self._file = h5py.File(self._path)
        return torch.from_numpy(self._file["input"][index]), int(self._file["label"][index])


def run(context: Context) -> Findings:
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            findings = [measure_case(Path(folder), rows, layout, context.quick) for rows in ROWS for layout in LAYOUTS]
    finally:
        torch.set_num_threads(n_threads)
    return Findings(
        arms=tuple(arm for arms, _, _ in findings for arm in arms),
        targets=tuple(target for _, targets, _ in findings for target in targets),
        notes=(
            "every file is in the page cache; a cold disk is slower for every arm but ram and bound",
            "ram reads the file once before the first batch; the seconds are in its note and not in its rate",
            *(note for _, _, note in findings),
        ),
    )


def measure_case(folder: Path, rows: Rows, layout: str, quick: bool) -> tuple[list[Arm], list[Target], str]:
    rows = dataclasses.replace(rows, n_rows=rows.n_rows // 8) if quick else rows
    path = write_file(folder, rows, layout)
    passes, placing_s = build_passes(path)
    block_s = 0.03 if quick else 0.3
    for start in passes.values():
        measure_rate(start, block_s)
    rounds = run_rounds(list(passes), lambda name: measure_rate(passes[name], block_s), n_rounds=2 if quick else 15)
    case = f"{rows.name}, {layout}"
    description = f"{case}: {rows.n_rows} rows, {describe_chunks(path)}"
    path.unlink()
    arms = [
        build_arm(
            compute_means(rounds, name, float),
            case=case,
            arm=name,
            metric="rows_per_s",
            unit_of_replication=f"round: two blocks of {block_s:g} s, arms in turn",
            note=describe_arm(name, placing_s),
        )
        for name in passes
    ]
    return arms, judge_case(rounds, case, rows), description


def build_passes(path: Path) -> tuple[dict[str, Pass], float]:
    """For every arm what starts a pass over the data, and the seconds it took to read the file into memory."""
    dataset = DATASETS["hdf5"](path=str(path), val_fraction=0)
    passes: dict[str, Pass] = {}
    placing_s = 0.0
    for placement in PLACEMENTS:
        started = time.perf_counter()
        loader = build_loader(
            dataset, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, seed=0, options={"placement": placement}
        )
        if placement == "ram":
            placing_s = time.perf_counter() - started
            held = loader.dataset.source.sources
        passes[placement] = _Epochs(loader)
    passes["per_row"] = DataLoader(PerRow(path), batch_size=BATCH_SIZE, shuffle=True, drop_last=True).__iter__
    tables = [source.table for source in held]
    passes["bound"] = lambda: gather(tables)
    return passes, placing_s


class _Epochs:
    """A pass over a loader of ours, each in an order of its own."""

    def __init__(self, loader: DataLoader):
        self._loader, self._epoch = loader, 0

    def __call__(self) -> Iterator[object]:
        self._loader.sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)


def gather(tables: list[torch.Tensor]) -> Iterator[object]:
    """Batches of random rows of tables in memory, a call each."""
    order = torch.randperm(len(tables[0]))
    for first in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        chosen = order[first : first + BATCH_SIZE]
        yield [table.index_select(0, chosen) for table in tables]


def measure_rate(start: Pass, seconds: float) -> float:
    """Rows per second over whole batches, passes started anew until ``seconds`` have gone; one batch at least."""
    n_batches, started = 0, time.perf_counter()
    while True:
        for _ in start():
            n_batches += 1
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                return n_batches * BATCH_SIZE / elapsed


def judge_case(rounds: list[Round[float]], case: str, rows: Rows) -> list[Target]:
    shares = compute_ratios(rounds, "ram", "bound")
    targets = [_judge(f"{case}: ram over bound", shares, LEAST_SHARE)]
    if rows.row_bytes < 10_000:
        for arm in ("stream", "ram"):
            targets.append(_judge(f"{case}: {arm} over per_row", compute_ratios(rounds, arm, "per_row"), LEAST_SPEEDUP))
    return targets


def _judge(name: str, ratios: list[float], at_least: float) -> Target:
    return judge(name, statistics.median(ratios), compute_bounds(ratios), at_least=at_least)


def compute_ratios(rounds: list[Round[float]], arm: str, reference: str) -> list[float]:
    """One ratio a round."""
    return [
        value / base
        for value, base in zip(compute_means(rounds, arm, float), compute_means(rounds, reference, float), strict=True)
    ]


def describe_arm(name: str, placing_s: float) -> str | None:
    if name == "ram":
        return f"data.placement ram, the file read in {placing_s:.2f} s before"
    if name == "per_row":
        return f"a Dataset that reads one row a call from an open file, DataLoader, num_workers 0; {PER_ROW_LINK}"
    return f"data.placement {name}" if name in PLACEMENTS else "index_select from tensors in memory, no loader"
