"""Steps under torch's profiler: what is listed is what a step does, and nothing is trained."""

import json
import pickle
import re
from pathlib import Path

import pytest
import torch
import training_cases

from fulltilt.config import config_from_values
from fulltilt.engine.measured.step_profile import profile_steps
from fulltilt.errors import DataError, StorageError, UsageError

HERE = Path(__file__).parent


def profile(out_dir, *, n_steps=3, device="cpu", **speed):
    values = {"task": "training_cases:build_workload", "data": {"batch_size": 16}, "speed": {"threads": 1, **speed}}
    config = config_from_values(values, base_dir=str(HERE))
    return profile_steps(config, device=torch.device(device), n_steps=n_steps, out_dir=out_dir)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_operators_are_those_of_the_steps_without_the_warm_up(tmp_path, accumulate):
    found = profile(tmp_path, accumulate=accumulate)
    calls = {operator.name: operator.calls_per_step for operator in found.operators}
    assert calls["Optimizer.step#AdamW.step"] == 1
    assert calls["aten::addmm"] == 2 * accumulate  # the two linear layers of the model
    times = [operator.cpu_ms_per_step for operator in found.operators]
    assert times == sorted(times, reverse=True)
    assert sum(operator.share_pct for operator in found.operators) == pytest.approx(100)
    addmm = next(operator for operator in found.operators if operator.name == "aten::addmm")
    assert addmm.mib_per_step > 0
    # The costliest may be of the last batch, which has ten rows.
    assert re.fullmatch(r"\[16\] \[(16|10), 6\] \[6, 16\]|\[3\] \[(16|10), 16\] \[16, 3\]", addmm.shapes)
    assert found.operators[0].share_pct == pytest.approx(100 * times[0] / sum(times))
    events = json.loads(Path(found.trace_path).read_text())["traceEvents"]
    assert sum(event["name"] == "Optimizer.step#AdamW.step" for event in events) == found.n_steps == 3
    assert (found.snapshot_path, found.operators[0].device_ms_per_step) == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"], "nothing is trained"


def test_what_cannot_be_profiled_is_told(tmp_path):
    with pytest.raises(UsageError, match="0 steps"):
        profile(tmp_path, n_steps=0)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot be written .* give another --out"):
        profile(tmp_path / "file")


def test_a_file_that_the_data_misses_is_told_as_it_is(tmp_path, monkeypatch):
    """It read as "the profile cannot be written to …": what steps raise was caught with what writing raises."""
    monkeypatch.setattr(training_cases.Points, "__getitem__", lambda self, index: (tmp_path / "gone").read_bytes())
    with pytest.raises(DataError, match=r"of Points cannot be read: FileNotFoundError: .*gone"):
        profile(tmp_path / "out")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_kernels_have_times_and_memory_a_snapshot(tmp_path):
    found = profile(tmp_path, device="cuda:0")
    assert sum(operator.device_ms_per_step or 0.0 for operator in found.operators) > 0
    assert found.snapshot_path is not None
    with Path(found.snapshot_path).open("rb") as stream:
        assert any(pickle.load(stream)["device_traces"])
    torch.zeros(1000, device="cuda")
    assert not any(torch.cuda.memory._snapshot().get("device_traces", ())), "recording has ended"
