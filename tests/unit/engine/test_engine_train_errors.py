"""What ends a run, or would: told in the user's terms, and never as success."""

import pytest
import torch
from torch import nn
from training_cases import Points, Recorder, build_config, build_workload, run_train

from fulltilt.engine.checkpoints.files import NEWEST, PREVIOUS
from fulltilt.engine.loop.bad_batch import suggest_stability
from fulltilt.errors import DataError, RunFolderError, UsageError
from fulltilt.records import Noted, RunEnded, RunStarted


def test_a_checkpoint_of_another_model_gives_way_to_the_one_before(tmp_path):
    whole, _ = run_train(tmp_path / "whole")
    run_train(tmp_path / "x", max_steps=8)  # newest: of step 8; before it: of the first epoch, step 6
    state = torch.load(tmp_path / "x" / NEWEST, weights_only=True)
    state["model"]["0.weight"] = torch.zeros(4, 4)
    torch.save(state, tmp_path / "x" / NEWEST)
    result, recorder = run_train(tmp_path / "x", resume=True)
    (told,) = [note.message for note in recorder.of(Noted) if "another model" in note.message]
    assert "0.weight (4, 4) instead of (16, 6)" in told
    assert told.endswith(f"going on from {PREVIOUS}")
    assert recorder.of(RunStarted)[0].first_step == 6
    assert (result.loss, result.metrics) == (whole.loss, whole.metrics)
    assert (tmp_path / "x" / "checkpoint.damaged.pt").exists()


def test_when_both_checkpoints_are_of_another_model_the_newest_is_named(tmp_path):
    run_train(tmp_path, max_steps=8)
    for name in (NEWEST, PREVIOUS):
        state = torch.load(tmp_path / name, weights_only=True)
        state["model"]["0.weight"] = torch.zeros(4, 4)
        torch.save(state, tmp_path / name)
    with pytest.raises(RunFolderError, match=rf"/{NEWEST} is of another model"):
        run_train(tmp_path, resume=True)
    assert (tmp_path / NEWEST).exists()


def test_code_that_calls_sys_exit_does_not_end_as_if_all_were_well(tmp_path):
    class Leaves(Points):
        def __getitem__(self, index):
            if index == 50:
                raise SystemExit(0)
            return super().__getitem__(index)

    recorder = Recorder()
    with pytest.raises(UsageError, match=r"called sys.exit\(0\) after step \d"):
        run_train(tmp_path, recorder=recorder, workload=build_workload(dataset=Leaves))
    assert recorder.of(RunEnded)[0].reason == "failed: sys.exit(0) was called"


def test_a_target_beyond_the_outputs_is_told_as_one(tmp_path):
    class Wrong(Points):
        def __getitem__(self, index):
            inputs, target = super().__getitem__(index)
            return inputs, target + 4

    with pytest.raises(DataError, match=r"a target is [456], and the model has fewer outputs"):
        run_train(tmp_path, workload=build_workload(dataset=Wrong))


def test_an_operator_without_a_deterministic_form_is_named_with_the_setting(tmp_path):
    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            out = self.linear(x)
            return out.put(torch.zeros(1, dtype=torch.int64), torch.zeros(1))

    with pytest.raises(UsageError, match=r"put_? has no form on cpu .*set run.deterministic to false"):
        run_train(tmp_path, build_config(run__deterministic=True), workload=build_workload(model=Puts))


def test_advice_does_not_name_a_precision_that_would_change_nothing():
    assert "precision" in suggest_stability("fp16")
    assert "precision" not in suggest_stability("fp32")
