"""One step: what it bills to which phase, and what it refuses."""

import multiprocessing

import pytest
import step_cases
import torch
from step_cases import take_epochs, take_step
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import DataError, UsageError, WorkerDiedError
from fulltilt.measure import NullTimer
from fulltilt.measure.nested import count_samples, find_tensor


class Recorder:
    def __init__(self):
        self.phases = []

    def lap(self, phase):
        self.phases.append(phase)


def build_model():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3))


def build_dataset():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(40, 2, 6, 6, generator=generator), torch.randint(3, (40,), generator=generator))


def build(plan=None, **workload):
    given = {"model": build_model, "dataset": build_dataset}
    return step_cases.build_small_run(8, plan=plan, **given | workload)


def test_phases_are_billed_in_order_once_per_micro_batch():
    recorder = Recorder()
    take_step(build({"accumulate": 2}), recorder)
    assert recorder.phases == ["data_wait", "forward", "backward"] * 2 + ["optimizer"]


def test_the_end_of_the_epoch_is_none_and_a_short_window_is_a_step():
    outcomes = take_epochs(build({"batch_size": 16}))
    assert [(o.n_samples, o.n_micro) for o in outcomes] == [(16, 1), (16, 1), (8, 1)]
    assert not outcomes[0].loss.requires_grad
    assert outcomes[0].loss.shape == ()


def test_gradients_are_gone_after_a_step():
    run = build()
    take_step(run)
    assert all(p.grad is None for p in run.setup.model.parameters())


def test_observe_gets_every_micro_batch_without_gradients():
    seen = []

    def look(outputs, targets):
        seen.append((outputs.shape, targets.shape, (outputs * 2).requires_grad))

    take_step(build({"accumulate": 5}), observe=look)
    assert seen == [((8, 3), (8,), False)] * 5


class Pairs(Dataset):
    """Inputs are a pair, targets a dict: nested as deep as collation goes."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return (torch.rand(3, generator=generator), torch.rand(2, generator=generator)), {"y": torch.tensor(1.0)}


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 1)

    def forward(self, a_BC, b_BC):
        return self.head(torch.cat([a_BC, b_BC], 1))[:, 0]


def test_nested_batches_reach_model_and_loss():
    run = build(dataset=Pairs, model=TwoInputs, loss=lambda out, targets: (out - targets["y"]).square().mean())
    outcome = take_step(run)
    assert outcome.n_samples == 8
    assert outcome.loss.isfinite()


def test_prepare_runs_on_every_micro_batch_with_the_runs_generator():
    def prepare(batch, generator):
        images, _ = batch
        noise = torch.randn(images.shape[0], 3, generator=generator)
        return (images,), noise

    def train():
        run = build({"accumulate": 2}, prepare=prepare, loss=nn.MSELoss())
        step, batches = TrainStep(run), run.start_epoch(0)
        return [float(step(batches, NullTimer()).loss) for _ in range(2)]

    first, second = train(), train()
    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("batch", "n"),
    [
        (torch.zeros(7, 2), 7),
        ((torch.zeros(5), torch.zeros(5)), 5),
        ({"a": torch.tensor(1.0), "b": torch.zeros(4, 1)}, 4),
        ([[torch.zeros(3, 1), torch.zeros(3)], "text"], 3),
    ],
)
def test_samples_are_counted_in_nested_batches(batch, n):
    assert count_samples(batch) == n


def test_a_batch_without_a_tensor_is_an_error():
    with pytest.raises(DataError, match="no tensor"):
        count_samples((["a", "b"], 3))
    assert find_tensor("text") is None


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        (
            {"loss": lambda out, y: nn.functional.cross_entropy(out, y, reduction="none")},
            UsageError,
            r"a tensor of shape \(8,\)",
        ),
        ({"loss": lambda out, y: 3.0}, UsageError, "the loss returned float"),
        (
            {"dataset": lambda: TensorDataset(torch.zeros(16, 2), torch.zeros(16), torch.zeros(16))},
            DataError,
            r"a batch is 3 parts, expected \(inputs, targets\)",
        ),
        # A dict of two keys unpacks into its keys: the model would get a text.
        ({"dataset": lambda: Named()}, DataError, r"a batch is a dict, expected \(inputs, targets\).*prepare"),
        ({"model": lambda: Broken(1, 1)}, KeyError, "mine"),  # the user's own errors come through as they are
    ],
)
def test_what_no_step_can_take_is_an_error(changes, error, words):
    with pytest.raises(error, match=words):
        take_step(build(**changes))


class Named(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {"x": torch.rand(1), "y": torch.rand(1)}


class Broken(nn.Linear):
    def forward(self, input):
        raise KeyError("mine")


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.usefixtures("own_tmpdir")
def test_a_data_worker_that_is_killed_is_named(persistent):
    left_by_others = set(multiprocessing.active_children())
    with build({"num_workers": 1, "batch_size": 2, "persistent_workers": persistent}) as run:
        step, batches = TrainStep(run), run.start_epoch(0)
        step(batches, NullTimer())
        (worker,) = {*multiprocessing.active_children()} - left_by_others
        worker.kill()
        with pytest.raises(WorkerDiedError, match=rf"pid {worker.pid}\) died: killed by SIGKILL"):
            list(iter(lambda: step(batches, NullTimer()), None))
