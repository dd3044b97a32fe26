"""Probes of a part see that part: delays planted in the loader or in the model show where they were planted."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from step_cases import build_small_run
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from fulltilt.engine.build.run import Run
from fulltilt.engine.measured.measurement import run_measured
from fulltilt.engine.measured.probes import N_RESIDENT, run_device_probe, run_loader_probe, run_memory_probe
from fulltilt.errors import DataError, FakeRunError

SLOW_S = 0.002  # per sample in the loader, or per call of the model


class SlowRows(Dataset):
    def __init__(self, seconds: float = SLOW_S):
        self.seconds, self.n_read = seconds, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.n_read += 1
        time.sleep(self.seconds)
        return torch.full((12,), float(index)), index % 3


class SlowModel(nn.Module):
    def __init__(self, seconds: float = 0.0, hidden: int = 10):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, hidden), nn.ReLU(), nn.Linear(hidden, 3))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.layers(x)


def build(plan: dict[str, Any] | None = None, *, load_s: float = 0.0, step_s: float = 0.0, **fields: Any) -> Run:
    given = {"model": lambda: SlowModel(step_s), "dataset": lambda: SlowRows(load_s), "optimizer": None}
    return build_small_run(8, plan=plan, **given | fields)


def test_a_device_probe_does_not_wait_for_data():
    rows = SlowRows()
    with build(dataset=lambda: rows) as run:
        result = run_device_probe(run, n_steps=8, max_measure_s=1.0)
    assert result.n_steps >= 8
    assert rows.n_read == N_RESIDENT * 8
    assert result.observed["batch_size"] == 8
    assert result.memory_rss_peak_gib > 0


def test_a_device_probe_sees_a_slow_step_and_accumulates_like_the_run():
    with build({"accumulate": 4}, step_s=0.01) as run:
        result = run_device_probe(run, n_steps=4, max_measure_s=1.0)
    assert 32 / result.samples_per_s > 4 * 0.01
    assert result.observed["accumulate"] == 4


def test_a_loader_probe_takes_no_step():
    with build(load_s=SLOW_S, step_s=10.0) as run:
        before = [p.clone() for p in run.setup.model.parameters()]
        result = run_loader_probe(run, n_steps=8, max_measure_s=1.0)
        assert all(torch.equal(a, b) for a, b in zip(before, run.setup.model.parameters(), strict=True))
    assert 8 / result.samples_per_s > 8 * SLOW_S
    assert result.phases_ms is None
    assert result.receive_ms is None
    assert "without workers" in result.null_reasons["receive_ms"]


@pytest.mark.slow
def test_workers_load_side_by_side_and_a_full_queue_is_quick_to_take_from():
    alone_s = 4 * 0.05
    with build({"num_workers": 2, "persistent_workers": True, "batch_size": 4}, load_s=0.05) as run:
        result = run_loader_probe(run, n_steps=16, max_measure_s=2.0)
    assert 4 / result.samples_per_s < 0.8 * alone_s
    assert result.receive_ms < 0.5 * alone_s * 1e3
    assert result.observed["num_workers"] == 2


def test_a_memory_probe_computes_nothing_and_grows_with_the_batch():
    def never(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert isinstance(outputs, torch._subclasses.FakeTensor)
        return nn.functional.cross_entropy(outputs, targets)

    peaks = []
    for batch_size in (8, 64):
        with build({"batch_size": batch_size}, loss=never, model=lambda: SlowModel(hidden=4096)) as run:
            peaks.append(run_memory_probe(run).memory_allocated_peak_gib * 2**30)
    parameters = 4 * (12 * 4096 + 4096 + 4096 * 3 + 3)
    assert peaks[0] > 3 * parameters, "weights and the two moments of AdamW"
    assert peaks[1] - peaks[0] >= 4 * 4096 * 56, "one hidden activation at least for each further sample"


def test_a_memory_probe_that_needs_the_data_says_so():
    class Branches(SlowModel):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > -1 else x[:, :3]

    with build(model=Branches) as run, pytest.raises(FakeRunError, match="real probes measure"):
        run_memory_probe(run)


@pytest.mark.parametrize("measure", [run_device_probe, run_loader_probe, run_measured])
def test_a_dataset_without_a_batch_is_an_error(measure):
    class Empty(IterableDataset):
        def __iter__(self):
            return iter(())

    with build(dataset=Empty) as run, pytest.raises(DataError, match="yielded no batch in"):
        measure(run, n_steps=4, max_measure_s=0.5)
