"""What ends a run, or would: told in the user's terms, and never as success."""

import pytest
import torch
from training_cases import Points, Recorder, build_config, build_workload, run_train

from fulltilt.engine.loop.bad_batch import suggest_stability
from fulltilt.errors import DataError, UsageError
from fulltilt.records import RunEnded


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
    def put(outputs, targets):
        return outputs.put(torch.zeros(1, dtype=torch.int64), torch.zeros(1)).mean()

    with pytest.raises(UsageError, match=r"put_? has no form on cpu .*set run.deterministic to false"):
        run_train(tmp_path, build_config(run__deterministic=True), workload=build_workload(loss=put))


def test_advice_does_not_name_a_precision_that_would_change_nothing():
    assert "precision" in suggest_stability("fp16")
    assert "precision" not in suggest_stability("fp32")
