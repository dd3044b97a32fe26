"""Rows per second out of HDF5 files in random order, beside a loader that reads row by row, and beside memory itself.

All arms deliver shuffled batches of 256 rows and their labels as tensors in host memory, in this process, on one
thread. ``bound`` holds the same rows in memory and gathers the batches from there with one call: no loader can do more
than move those bytes once. Arms run in turn within a round, and a ratio is taken within its round.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks._rounds import Round, build_arms, compute_ratios, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, judge_median
from fulltilt.data import DATASETS, build_loader

NAME = "hdf5_loader"
CLAIM = (
    "Random batches out of an HDF5 file arrive over 20 times as fast as row by row, and with its rows placed in memory "
    "at the speed of a gather from there, whatever its chunks."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of one size, float32."""

    name: str
    shape: tuple[int, ...]  # of one row
    n_rows: int

    @property
    def row_bytes(self) -> int:
        return 4 * int(np.prod(self.shape))


BATCH_SIZE = 256
ROWS = (
    Rows(name="5 KB rows", shape=(256, 5), n_rows=40_000),
    Rows(name="40 KB rows", shape=(2, 5120), n_rows=8_000),
)
LAYOUTS = ("one array", "16 whole rows a chunk", "h5py's own chunks")
PLACEMENTS = ("stream", "memory_map", "ram", "block_shuffled")
PER_ROW_LINK = "https://docs.h5py.org/en/stable/high/dataset.html#reading-writing-data"
LEAST_SPEEDUP, LEAST_SHARE = 20.0, 0.8

Pass = Callable[[], Iterator[object]]


class PerRow(Dataset):
    """Rows as most people read them: one sample, one read. The file stays open, which is the better way to write it."""

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
    path, chunks = write_file(folder, rows, layout)
    passes, placing_s = build_passes(path)
    block_s = 0.03 if quick else 0.3
    for start in passes.values():
        measure_rate(start, block_s)
    rounds = run_rounds(list(passes), lambda name: measure_rate(passes[name], block_s), n_rounds=2 if quick else 15)
    path.unlink()
    case = f"{rows.name}, {layout}"
    notes = {name: f"data.placement {name}" for name in PLACEMENTS} | {
        "ram": f"data.placement ram, the file read in {placing_s:.2f} s before",
        "per_row": f"a Dataset that reads one row a call from an open file, DataLoader, num_workers 0; {PER_ROW_LINK}",
        "bound": "index_select from tensors in memory, no loader",
    }
    unit = f"round: two blocks of {block_s:g} s, arms in turn"
    arms = build_arms(rounds, case=case, metric="rows_per_s", unit_of_replication=unit, notes=notes)
    said = f"chunks {chunks}" if chunks else "no chunks"
    return arms, judge_case(rounds, case, rows), f"{case}: {rows.n_rows} rows, {said}"


def write_file(folder: Path, rows: Rows, layout: str) -> tuple[Path, tuple[int, ...] | None]:
    """Write ``input`` (N, …) and ``label`` (N,), a row's label being its number; the page cache then holds the file.

    Returns:
        Its path, and its chunks.
    """
    path = folder / f"{rows.row_bytes}-{LAYOUTS.index(layout)}.h5"
    rng = np.random.default_rng(0)
    asked = dict(zip(LAYOUTS, (None, (16, *rows.shape), True), strict=True))
    with h5py.File(path, "w") as file:
        table = file.create_dataset(
            "input", (rows.n_rows, *rows.shape), dtype="f4", chunks=asked[layout], fillvalue=None
        )
        chunks = table.chunks
        step = (chunks or (1024,))[0]
        for first in range(0, rows.n_rows, step):
            end = min(first + step, rows.n_rows)
            table[first:end] = rng.random((end - first, *rows.shape), dtype=np.float32)
        file["label"] = np.arange(rows.n_rows)
    return path, chunks


def build_passes(path: Path) -> tuple[dict[str, Pass], float]:
    """Return for every arm what starts a pass over the data, and the seconds it took to read the file into memory."""
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
            tables = [source.table for source in loader.dataset.source.sources]
        passes[placement] = _Epochs(loader)
    passes["per_row"] = DataLoader(PerRow(path), batch_size=BATCH_SIZE, shuffle=True, drop_last=True).__iter__
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
    """Yield batches of random rows of tables in memory, a call each."""
    order = torch.randperm(len(tables[0]))
    for first in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
        chosen = order[first : first + BATCH_SIZE]
        yield [table.index_select(0, chosen) for table in tables]


def measure_rate(start: Pass, seconds: float) -> float:
    """Measure rows per second over whole batches, passes started anew until ``seconds`` have gone."""
    n_batches, started = 0, time.perf_counter()
    while True:
        for _ in start():
            n_batches += 1
            elapsed = time.perf_counter() - started
            if elapsed >= seconds:
                return n_batches * BATCH_SIZE / elapsed


def judge_case(rounds: list[Round[float]], case: str, rows: Rows) -> list[Target]:
    limits = {("ram", "bound"): LEAST_SHARE}
    if rows.row_bytes < 10_000:
        limits |= {("stream", "per_row"): LEAST_SPEEDUP, ("ram", "per_row"): LEAST_SPEEDUP}
    return [
        judge_median(f"{case}: {arm} over {other}", compute_ratios(rounds, arm, other), at_least=least)
        for (arm, other), least in limits.items()
    ]
