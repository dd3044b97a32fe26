"""A loss that is not finite is traced to its step, and the batch of that step is stored."""

import pytest
import torch
from training_cases import CONSTANT, N_FEATURES, N_SAMPLES, Points, PointStream, build_config, build_workload, run_train

from fulltilt.engine.loop.bad_batch import describe_batch, find_bad_step
from fulltilt.errors import NonFiniteLossError

NAN = float("nan")


class Poisoned(Points):
    def __init__(self):
        super().__init__(noise=0)
        self.inputs[37, 2] = NAN


def load(folder):
    return torch.load(folder / "nan_batch.pt", weights_only=True)


@pytest.mark.parametrize("changes", [{}, {"data__num_workers": 1}, {"data__batch_size": 8, "speed__accumulate": 2}])
def test_the_batch_of_the_first_bad_step_is_stored_and_the_sample_named(tmp_path, changes):
    config = build_config(run__log_every_n_steps=4, **changes)
    with pytest.raises(NonFiniteLossError, match="holds NaN or infinity in sample 37 of the training set") as caught:
        run_train(tmp_path, config, workload=build_workload(dataset=Poisoned, prepare=None))
    stored = load(tmp_path)
    assert f"the batch of step {stored['step']} is in {tmp_path / 'nan_batch.pt'}" in str(caught.value)
    assert 37 in stored["indices"]
    inputs, targets = (torch.cat(parts) for parts in zip(*stored["batches"], strict=True))
    assert len(stored["batches"]) == changes.get("speed__accumulate", 1)
    torch.testing.assert_close(inputs, Poisoned().inputs[stored["indices"]], equal_nan=True)
    assert torch.equal(targets, Points().targets[stored["indices"]])
    assert stored["first_sample"] == (stored["step"] - 1) * 16


def test_a_sample_of_a_stream_is_named_by_its_place_in_the_batch(tmp_path):
    class Stream(PointStream):
        def __iter__(self):
            points = Poisoned()
            return iter([points[i] for i in range(N_SAMPLES)])

    with pytest.raises(NonFiniteLossError, match=r"step 3 .* in sample 5 of the batch"):
        run_train(tmp_path, build_config(**CONSTANT), workload=build_workload(dataset=Stream, prepare=None))
    assert load(tmp_path)["indices"] is None


def test_finite_data_is_said_to_be_finite(tmp_path):
    workload = build_workload(loss=lambda outputs, targets: outputs.sum() * NAN)
    with pytest.raises(NonFiniteLossError, match=r"step 1 .* all its values are finite"):
        run_train(tmp_path, workload=workload)


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
