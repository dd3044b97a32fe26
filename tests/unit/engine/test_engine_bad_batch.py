"""What ends a run is told in the user's terms; the batch of a loss that is not finite is stored."""

import pytest
import torch
from training_cases import (
    CONSTANT,
    N_FEATURES,
    N_SAMPLES,
    Points,
    PointStream,
    Recorder,
    build_config,
    build_workload,
    run_train,
)

from fulltilt.engine.loop.bad_batch import describe_batch, find_bad_step, suggest_stability
from fulltilt.errors import DataError, NonFiniteLossError, UsageError
from fulltilt.records import RunEnded

NAN = float("nan")


class Poisoned(Points):
    def __init__(self):
        super().__init__(noise=0)
        self.inputs[37, 2] = NAN


def load(folder):
    return torch.load(folder / "nan_batch.pt", weights_only=True)


@pytest.mark.parametrize("changes", [{}, {"data__num_workers": 1}, {"data__batch_size": 8, "speed__accumulate": 2}])
def test_the_batch_of_the_first_bad_step_is_stored_and_the_sample_named(tmp_path, changes):
    config, recorder = build_config(run__log_every_n_steps=4, **changes), Recorder()
    with pytest.raises(NonFiniteLossError, match="holds NaN or infinity in sample 37 of the training set") as caught:
        run_train(tmp_path, config, recorder, workload=build_workload(dataset=Poisoned, prepare=None))
    stored = load(tmp_path)
    assert recorder.of(RunEnded)[0].step == stored["step"], "it ended some steps later, when the loss was read"
    assert f"the batch of step {stored['step']} is in {tmp_path / 'nan_batch.pt'}" in str(caught.value)
    assert str(caught.value).endswith("; mend these samples, or leave them out of the data set"), "no lr helps there"
    assert 37 in stored["indices"]
    inputs, targets = (torch.cat(parts) for parts in zip(*stored["batches"], strict=True))
    assert len(stored["batches"]) == changes.get("speed__accumulate", 1)
    torch.testing.assert_close(inputs, Poisoned().inputs[stored["indices"]], equal_nan=True)
    assert torch.equal(targets, Points().targets[stored["indices"]])
    assert stored["first_sample"] == (stored["step"] - 1) * 16


@pytest.mark.parametrize("n_workers", [0, 1])
def test_an_error_of_the_data_set_is_one_message_and_its_traceback_lies_beside_the_run(tmp_path, n_workers):
    """It was 127 lines of tracebacks where a data worker met it."""

    class Bad(Points):
        def __getitem__(self, index):
            if index == 37:
                raise ValueError("no such pixel")
            return super().__getitem__(index)

    config, recorder = build_config(data__num_workers=n_workers), Recorder()
    with pytest.raises(DataError) as caught:
        run_train(tmp_path, config, recorder, workload=build_workload(dataset=Bad))
    log, line = tmp_path / "traceback.log", Bad.__getitem__.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"sample 37 of Bad cannot be read: ValueError: no such pixel ({__file__}:{line}); "
        f"data.on_bad_sample=skip(limit=100) leaves such samples out (log: {log})"
    )
    assert recorder.of(RunEnded)[0].reason == f"failed: DataError: {caught.value}"
    assert 'raise ValueError("no such pixel")' in log.read_text()


def test_a_stream_that_fails_as_it_begins_is_one_message_without_workers(tmp_path):
    class Broken(PointStream):
        def __iter__(self):
            raise ValueError("no such row")

    said = r"a batch of Broken cannot be read: ValueError: no such row \(.*; mend the data.* \(log: .*traceback.log\)"
    with pytest.raises(DataError, match=said):
        run_train(tmp_path, build_config(**CONSTANT), workload=build_workload(dataset=Broken))
    assert 'raise ValueError("no such row")' in (tmp_path / "traceback.log").read_text()


def test_a_sample_of_a_stream_is_named_by_its_place_in_the_batch(tmp_path):
    class Stream(PointStream):
        def __iter__(self):
            points = Poisoned()
            return iter([points[i] for i in range(N_SAMPLES)])

    with pytest.raises(NonFiniteLossError, match=r"step 3 .* in sample 5 of the batch"):
        run_train(tmp_path, build_config(**CONSTANT), workload=build_workload(dataset=Stream, prepare=None))
    assert load(tmp_path)["indices"] is None


def test_the_batch_of_a_stream_that_draws_is_the_one_that_was_bad(tmp_path):
    """Another one was stored, as the stream drew anew."""

    class Shuffled(PointStream):
        def __iter__(self):
            points = Poisoned()
            return (points[i] for i in torch.randperm(N_SAMPLES).tolist())

    with pytest.raises(NonFiniteLossError, match="holds NaN or infinity in sample"):
        run_train(tmp_path, build_config(**CONSTANT), workload=build_workload(dataset=Shuffled, prepare=None))


def test_a_batch_that_cannot_be_read_again_leaves_the_message_about_the_loss(tmp_path):
    class Once(Poisoned):
        n_read = 0

        def __getitem__(self, index):
            self.n_read += 1
            if self.n_read > N_SAMPLES:
                raise OSError("the share is gone")
            return super().__getitem__(index)

    config = build_config(run__log_every_n_steps=100)
    with pytest.raises(NonFiniteLossError, match=r"the loss is nan .* could not be stored \(the share is gone\)"):
        run_train(tmp_path, config, workload=build_workload(dataset=Once))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([1.0, NAN, NAN], 9), ([NAN], 10), ([1.0, float("inf")], 10), ([1.0, 2.0], None), ([], None)],
)
def test_the_first_loss_that_is_not_finite_decides(losses, expected):
    assert find_bad_step(losses, last_step=10) == expected


def test_many_bad_samples_are_counted():
    batch = (torch.full((9, N_FEATURES), NAN), torch.zeros(9))
    assert "sample 0, 1, 2, 3, 4 and 4 more of the batch" in describe_batch([batch], None)


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
