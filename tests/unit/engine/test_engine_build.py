"""Building a run: reproducible, every lever in force, and clear about what cannot be built."""

import multiprocessing

import psutil
import pytest
import torch
from step_cases import take_epochs
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from fulltilt.config import config_from_values
from fulltilt.data import digits
from fulltilt.engine.build.builder import build_run, check_device
from fulltilt.engine.build.facts import describe_data
from fulltilt.errors import DataError, DeviceError, PlanObstacleError, UsageError
from fulltilt.levers import default_plan
from fulltilt.records import Plan
from fulltilt.tasks import Workload


def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def build_dataset(n_samples=50):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n_samples, 2, 2, 2, generator=generator)
    return TensorDataset(x, torch.randint(3, (n_samples,), generator=generator))


def make_workload(**fields):
    return Workload(**{"model": build_model, "dataset": build_dataset, "loss": nn.CrossEntropyLoss()} | fields)


def build(values=None, seed=None, *, plan=None, **fields):
    config = config_from_values(values or {}, base_dir=".")
    full = default_plan({"batch_size": 8, "threads": 1} | (plan or {}))
    return build_run(config, full, device="cpu", workload=make_workload(**fields), seed=seed)


def train(run):
    return [float(outcome.loss) for outcome in take_epochs(run)]


def test_equal_seeds_train_equally_whatever_was_drawn_before_or_in_building():
    def draw_and_build(parameters):
        torch.rand(3)
        return torch.optim.AdamW(parameters)

    first = train(build(seed=3))
    torch.rand(100)
    assert train(build(seed=3)) == first
    assert train(build(seed=3, optimizer=draw_and_build)) == first
    assert train(build(seed=4)) != first
    assert train(build({"run": {"seed": 3}})) == first


@pytest.mark.parametrize(
    "changes", [{"num_workers": 2}, {"activation_checkpointing": True}, {"persistent_workers": True, "num_workers": 1}]
)
def test_levers_that_change_no_numbers_change_no_losses(changes):
    expected = train(build(seed=3))
    with build(seed=3, plan=changes) as run:
        assert train(run) == expected


def test_the_run_says_what_it_is():
    run = build({"data": {"drop_last": True}, "optim": {"clip_norm": 2.0}}, plan={"accumulate": 4})
    assert (run.n_samples, run.batch_size, run.steps_per_epoch, run.clip_norm) == (50, 8, 2, 2.0)
    assert (run.facts.optimizer, run.facts.n_samples, run.facts.has_conv) == ("AdamW", 50, False)
    assert (len(run.loader), run.plan["accumulate"]) == (6, 4)
    assert run.setup.model.training
    assert build().steps_per_epoch == 7


def test_without_a_configuration_a_workload_runs_with_defaults():
    run = build_run(None, default_plan({"batch_size": 25}), device="cpu", workload=make_workload())
    assert run.clip_norm is None
    assert len(train(run)) == 2
    with pytest.raises(UsageError, match="neither"):
        build_run(None, default_plan(), device="cpu")


def test_shuffle_follows_the_configuration_and_the_epoch():
    def read(run, epoch):
        return torch.cat([inputs for inputs, _ in run.start_epoch(epoch)])

    straight, shuffled = build({"data": {"shuffle": False}}), build()
    assert torch.equal(read(straight, 0), straight.dataset.tensors[0])
    assert torch.equal(read(shuffled, 0), read(build(), 0))
    assert not torch.equal(read(shuffled, 0), read(shuffled, 1))
    rest = torch.cat([inputs for inputs, _ in shuffled.start_epoch(1, start_index=40)])
    assert torch.equal(rest, read(shuffled, 1)[40:])


def test_auto_precision_is_resolved_in_the_plan():
    run = build(plan={"precision": "auto"})
    assert run.plan["precision"] == ("bf16" if run.facts.has_native_bf16 else "fp32")
    assert bool(run.notes) is (run.plan["precision"] == "fp32")


@pytest.mark.parametrize("persistent", [False, True])
def test_close_ends_the_workers_in_the_middle_of_an_epoch(persistent):
    left_by_others = set(multiprocessing.active_children())
    with build(plan={"num_workers": 2, "persistent_workers": persistent}) as run:
        batches = run.start_epoch(0)
        next(batches)
        workers = [psutil.Process(worker.pid) for worker in {*multiprocessing.active_children()} - left_by_others]
    gone, alive = psutil.wait_procs(workers, timeout=300)
    assert (len(gone), alive) == (2, [])


def test_an_iterable_dataset_trains():
    class Stream(IterableDataset):
        def __iter__(self):
            for index in range(20):
                yield torch.rand(2, 2, 2), torch.tensor(index % 3)

    run = build(dataset=Stream)
    assert (run.n_samples, run.steps_per_epoch, len(train(run))) == (None, None, 3)
    with pytest.raises(PlanObstacleError, match="once per worker"):
        build(dataset=Stream, plan={"num_workers": 2})


@pytest.mark.parametrize(
    ("fields", "plan", "error", "words"),
    [
        ({"dataset": lambda: build_dataset(0)}, {}, DataError, "holds 0 samples"),
        ({"dataset": lambda: build_dataset(5)}, {}, DataError, r"batch_size 8 is .*\(5 samples\); use batch_size 5"),
        ({}, {"accumulate": 9}, PlanObstacleError, "use accumulate 6 or less"),
        ({}, {"channels_last": True}, PlanObstacleError, "no 2-d convolution"),
        ({"optimizer": lambda p: torch.optim.RMSprop(p)}, {"fused_optimizer": True}, PlanObstacleError, "RMSprop"),
        ({"model": lambda: nn.Identity()}, {}, UsageError, "no parameter that requires a gradient"),
        ({"model": lambda: 3}, {}, UsageError, "returned int; it must return an nn.Module"),
        ({"model": lambda: nn.LazyLinear(3)}, {}, UsageError, r"without a shape yet \(weight, bias\)"),
        ({"dataset": lambda: None}, {}, UsageError, "of type NoneType; its function must"),
        ({"optimizer": lambda p: p}, {}, UsageError, "returned list; it must return an Optimizer"),
        ({"optimizer": torch.optim.LBFGS}, {}, UsageError, "LBFGS looks at the loss several times in a step"),
        (
            {"optimizer": lambda p: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)},
            {},
            UsageError,
            "holds no parameter of the model; build it of those that it is given",
        ),
        (
            {"explain": lambda *sizes: "fine"},
            {},
            UsageError,
            "explain of .* returned str; it must return a list",
        ),
        ({"explain": lambda *sizes: None}, {}, UsageError, "returned NoneType; it must return a list of texts"),
    ],
)
def test_what_cannot_be_built_is_said(fields, plan, error, words):
    with pytest.raises(error, match=words):
        build(plan=plan, **fields)


@pytest.mark.parametrize(
    ("device", "words"), [("cuda:97", "cuda:97 is not there"), ("gpu", "not a device"), ("meta", "not supported")]
)
def test_a_device_that_is_not_there(device, words):
    with pytest.raises(DeviceError, match=words):
        check_device(device)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan({"batch_size": 8}), "no value for accumulate, .*num_workers, .*default_plan"),
        (default_plan().replace(batchsize=3), "'batchsize' that there is not; did you mean batch_size"),
    ],
)
def test_an_incomplete_or_foreign_plan_is_refused(plan, said):
    with pytest.raises(PlanObstacleError, match=said):
        build_run(None, plan, device="cpu", workload=make_workload())


def test_a_configuration_of_another_machine_trains_when_not_strict():
    foreign = {"pin_memory": True, "cudnn_benchmark": True, "prefetch_factor": 4, "persistent_workers": True}
    plan = default_plan(foreign | {"batch_size": 8, "fused_optimizer": True})
    workload = make_workload(optimizer=lambda p: torch.optim.RMSprop(p))
    with pytest.raises(PlanObstacleError, match="no accelerator"):
        build_run(None, plan, device="cpu", workload=workload)
    run = build_run(None, plan, device="cpu", workload=workload, strict=False)
    assert run.plan == default_plan({"batch_size": 8})
    assert [note.partition("=")[0] for note in run.notes] == [*sorted(foreign), "fused_optimizer"]
    assert "pin_memory=True cannot apply and is taken as False: there is no accelerator" in " ".join(run.notes)
    assert len(train(run)) == 7
    with pytest.raises(PlanObstacleError, match="TF32"):
        build_run(None, plan.replace(precision="tf32"), device="cpu", workload=workload, strict=False)


def test_the_bytes_of_a_data_set_are_said_to_be_those_of_all_samples():
    dataset = digits("train")
    said = describe_data(dataset, build(dataset=lambda: dataset).facts)
    assert said == f"MemoryImages, {len(dataset)} samples, {len(dataset) * (8 * 8 + 8)} bytes in all"
