"""One step: what it bills to which phase, what it refuses, and that it never waits for the device."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fulltilt.config import config_from_values
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import DataError, UsageError, WorkerDiedError
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer
from fulltilt.measure.nested import count_samples, find_tensor
from fulltilt.tasks import Workload


class Recorder:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def lap(self, phase: str) -> None:
        self.phases.append(phase)


def build_model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 3))


def build_dataset() -> Dataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(40, 2, 6, 6, generator=generator), torch.randint(3, (40,), generator=generator))


def build_fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def build(plan: dict[str, Any] | None = None, clip_norm: float | None = None, **workload: Any) -> Run:
    given = {"model": build_model, "dataset": build_dataset, "loss": nn.CrossEntropyLoss(), "optimizer": build_fused}
    config = config_from_values({"optim": {"clip_norm": clip_norm}}, base_dir=".")
    full = default_plan({"batch_size": 8, "threads": 1} | (plan or {}))
    return build_run(config, full, device="cpu", workload=Workload(**given | workload))


READS = ("item", "__float__", "__bool__", "__int__", "__index__", "cpu", "numpy", "tolist", "__array__")


@contextlib.contextmanager
def count_reads() -> Iterator[Counter[str]]:
    """Counts every call that would read a tensor's value on the host."""
    counts: Counter[str] = Counter()
    originals = {name: getattr(torch.Tensor, name) for name in READS}

    def count(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return originals[name](self, *args, **kwargs)

        return read

    for name in READS:
        setattr(torch.Tensor, name, count(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


@pytest.mark.parametrize(
    ("plan", "clip_norm"),
    [
        ({}, None),
        ({"accumulate": 2}, 1.0),
        ({"precision": "bf16", "channels_last": True, "activation_checkpointing": False}, 0.1),
        ({"precision": "fp16", "fused_optimizer": True, "accumulate": 2}, 0.1),
        ({"precision": "fp16", "fused_optimizer": True}, None),
    ],
)
def test_no_step_reads_a_value_on_the_host(plan, clip_norm):
    metric = []
    run = build(plan, clip_norm)
    step = TrainStep(run, observe=lambda outputs, targets: metric.append(outputs.argmax(1) == targets))
    batches = [*list(run.start_epoch(0))[:-1], tuple(t[:5] for t in next(iter(run.loader)))]
    with count_reads() as counts:
        stream = iter(batches)
        while step(stream, NullTimer()) is not None:
            pass
    assert dict(counts) == {}
    assert len(metric) == 5


def test_the_interposer_sees_reads():
    with count_reads() as counts:
        value = torch.ones(1)
        bool(value), float(value), value.item(), value.tolist(), value.numpy()
    assert {"item", "tolist", "numpy"} <= set(counts)


def test_phases_are_billed_in_order_once_per_micro_batch():
    recorder = Recorder()
    run = build({"accumulate": 2})
    TrainStep(run)(run.start_epoch(0), recorder)
    assert recorder.phases == ["data_wait", "forward", "backward"] * 2 + ["optimizer"]


def test_the_end_of_the_epoch_is_none_and_a_short_window_is_a_step():
    run = build({"batch_size": 16})
    step, batches = TrainStep(run), run.start_epoch(0)
    outcomes = []
    while (outcome := step(batches, NullTimer())) is not None:
        outcomes.append(outcome)
    assert [(o.n_samples, o.n_micro) for o in outcomes] == [(16, 1), (16, 1), (8, 1)]
    assert not outcomes[0].loss.requires_grad
    assert outcomes[0].loss.shape == ()


def test_gradients_are_gone_after_a_step():
    run = build()
    TrainStep(run)(run.start_epoch(0), NullTimer())
    assert all(p.grad is None for p in run.setup.model.parameters())


def test_observe_gets_every_micro_batch_without_gradients():
    seen = []

    def look(outputs: torch.Tensor, targets: torch.Tensor) -> None:
        seen.append((outputs.shape, targets.shape, (outputs * 2).requires_grad))

    run = build({"accumulate": 5})
    TrainStep(run, observe=look)(run.start_epoch(0), NullTimer())
    assert seen == [((8, 3), (8,), False)] * 5


class Pairs(Dataset):
    """Inputs are a pair, targets a dict: nested as deep as collation goes."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return (torch.rand(3, generator=generator), torch.rand(2, generator=generator)), {"y": torch.tensor(1.0)}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 1)

    def forward(self, a_BC: torch.Tensor, b_BC: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([a_BC, b_BC], 1))[:, 0]


def test_nested_batches_reach_model_and_loss():
    run = build(dataset=Pairs, model=TwoInputs, loss=lambda out, targets: (out - targets["y"]).square().mean())
    outcome = TrainStep(run)(run.start_epoch(0), NullTimer())
    assert outcome.n_samples == 8
    assert outcome.loss.isfinite()


def test_prepare_runs_on_every_micro_batch_with_the_runs_generator():
    def prepare(batch: Any, generator: torch.Generator) -> Any:
        images, _ = batch
        noise = torch.randn(images.shape[0], 3, generator=generator)
        return (images,), noise

    def train() -> list[float]:
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
    ("loss", "words"),
    [
        (lambda out, y: nn.functional.cross_entropy(out, y, reduction="none"), r"a tensor of shape \(8,\)"),
        (lambda out, y: 3.0, "the loss returned float"),
    ],
)
def test_a_loss_that_is_no_scalar_is_an_error(loss, words):
    run = build(loss=loss)
    with pytest.raises(UsageError, match=words):
        TrainStep(run)(run.start_epoch(0), NullTimer())


def test_a_batch_that_is_no_pair_is_an_error():
    run = build(dataset=lambda: TensorDataset(torch.zeros(16, 2), torch.zeros(16), torch.zeros(16)))
    with pytest.raises(DataError, match=r"a batch is 3 parts, expected \(inputs, targets\)"):
        TrainStep(run)(run.start_epoch(0), NullTimer())


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


def test_errors_of_the_users_code_come_through_as_they_are():
    class Broken(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise KeyError("mine")

    run = build(model=lambda: Broken(1, 1))
    with pytest.raises(KeyError, match="mine"):
        TrainStep(run)(run.start_epoch(0), NullTimer())


def test_a_batch_that_is_a_mapping_needs_prepare_and_says_so():
    """A dict of two keys unpacks into its keys: the model would get a text."""

    class Named(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"x": torch.rand(1), "y": torch.rand(1)}

    with (
        build(dataset=Named, plan={"batch_size": 2}) as run,
        pytest.raises(DataError, match=r"a batch is a dict, expected \(inputs, targets\).*prepare"),
    ):
        TrainStep(run)(run.start_epoch(0), NullTimer())
