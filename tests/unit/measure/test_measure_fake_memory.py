"""Fake peaks against what can be counted by hand and the allocator's own events, without a trace in the run."""

import copy
import dataclasses
import functools
import gc
import itertools
import os

import pytest
import torch
from torch import nn, optim
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from fulltilt import Workload
from fulltilt.engine import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import DataError, FakeRunError
from fulltilt.hardware import read_rss_bytes
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer, estimate_memory
from fulltilt.tasks.diffusion import build_diffusion

WIDTH = 256
SQUARE_BYTES = WIDTH * WIDTH * 4


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small operators on several threads wait for each other far longer than they compute where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)

    def forward(self, x_BCHW):
        return self.norm(self.conv(x_BCHW)).relu().mean(dim=(2, 3))


def build_stack():
    return nn.Sequential(*[Residual() for _ in range(4)], nn.Linear(WIDTH, 10))


def build_workload(model=build_stack, *, optimizer=optim.AdamW, sample=(WIDTH,)):
    def build_dataset():
        return TensorDataset(torch.zeros(8, *sample), torch.zeros(8, dtype=torch.long))

    return Workload(model=model, dataset=build_dataset, loss=nn.CrossEntropyLoss(), optimizer=optimizer)


def estimate(workload, batch_size=64, *, imitate=None, device="cpu", **levers):
    run = build_run(None, default_plan({"batch_size": 2, **levers}), device=device, workload=workload)
    batch = next(iter(run.loader))
    return estimate_memory(run, batch_size, batch=batch, build_step=TrainStep, imitate=imitate)


def measure_real_peak_bytes(workload, batch_size, **levers):
    """From the events of torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run = build_run(None, default_plan({"batch_size": 2, **levers}), device="cpu", workload=workload)
        step = TrainStep(dataclasses.replace(run, batch_size=batch_size))
        for _ in range(2):
            step((grow(run, batch_size) for _ in range(run.setup.accumulate)), NullTimer())
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def grow(run, batch_size):
    return tuple(tensor.new_zeros((batch_size, *tensor.shape[1:])) for tensor in next(iter(run.loader)))


def build_square():
    return nn.Linear(WIDTH, WIDTH, bias=False)


def test_one_layer_is_counted_as_by_hand():
    peak = estimate(build_workload(build_square, optimizer=functools.partial(optim.SGD, lr=0.1, momentum=0.9)), 2)
    assert peak.parameters_bytes == peak.gradients_bytes == peak.optimizer_bytes == SQUARE_BYTES
    assert peak.persistent_bytes == 2 * SQUARE_BYTES
    assert peak.batch_bytes <= 2 * WIDTH * 4 + 64
    assert 3 * SQUARE_BYTES + peak.batch_bytes + peak.activations_bytes == peak.total_bytes


@pytest.mark.parametrize(
    ("optimizer", "n_states"),
    [(functools.partial(optim.SGD, lr=0.1), 0), (optim.RMSprop, 1), (optim.AdamW, 2), (optim.Adagrad, 1)],
)
def test_optimizer_state_is_what_each_optimizer_keeps(optimizer, n_states):
    peak = estimate(build_workload(build_square, optimizer=optimizer), 2)
    state_bytes = peak.persistent_bytes - peak.parameters_bytes
    assert n_states * SQUARE_BYTES <= state_bytes <= n_states * SQUARE_BYTES + 256


@pytest.mark.parametrize("batch_size", [2, 512])
@pytest.mark.parametrize(
    "levers", [{}, {"activation_checkpointing": True}, {"accumulate": 3}, {"fused_optimizer": True}]
)
def test_it_agrees_with_the_allocator_within_one_percent(batch_size, levers):
    real = measure_real_peak_bytes(build_workload(), batch_size, **levers)
    assert estimate(build_workload(), batch_size, **levers).total_bytes == pytest.approx(real, rel=0.01)


def test_levers_that_save_activations_are_seen_to():
    levers = ({}, {"activation_checkpointing": True}, {"precision": "bf16"}, {"precision": "fp16"})
    plain, checkpointed, mixed, scaled = (estimate(build_workload(), 512, **given) for given in levers)
    assert scaled.total_bytes < plain.total_bytes, "also with a scaler"
    assert checkpointed.activations_bytes < 0.5 * plain.activations_bytes
    assert mixed.activations_bytes < 0.9 * plain.activations_bytes
    assert checkpointed.persistent_bytes == mixed.persistent_bytes == plain.persistent_bytes


def test_growth_is_convex_in_the_batch_and_persistent_memory_stays():
    peaks = [estimate(build_workload(), batch) for batch in (128, 256, 384, 512)]
    grown = [b.total_bytes - a.total_bytes for a, b in itertools.pairwise(peaks)]
    assert grown[0] > 0
    assert grown == sorted(grown)
    assert len({peak.persistent_bytes for peak in peaks}) == 1


def test_a_batch_no_machine_could_hold_costs_no_memory():
    before = read_rss_bytes(os.getpid())
    peak = estimate(build_workload(), 2**27)
    assert read_rss_bytes(os.getpid()) - before < 2**28
    assert peak.total_gib > 1000
    assert peak.activations_bytes > 0.5 * peak.total_bytes


@pytest.mark.parametrize("levers", [{}, {"channels_last": True}])
def test_the_batch_is_the_batch_in_either_memory_format(levers):
    peak = estimate(build_workload(Convolutional, sample=(3, 16, 16)), 64, **levers)
    assert 1 <= peak.batch_bytes / (64 * 3 * 16 * 16 * 4) < 1.1


def test_a_gpu_is_imitated_by_its_rounding_and_by_updating_all_parameters_at_once():
    here, there = estimate(build_workload(), 2), estimate(build_workload(), 2, imitate="cuda")
    assert there.parameters_bytes % 512 == 0
    assert there.total_bytes > here.total_bytes + 0.5 * there.parameters_bytes, "sqrt of all second moments at once"


def test_the_run_stays_as_it_was():
    class Noisy(nn.Sequential):
        def forward(self, x, t_B, label):
            return super().forward(x)

    workload = build_diffusion(
        model=lambda: Noisy(nn.BatchNorm1d(2), nn.Dropout(0.5)),
        train=lambda: TensorDataset(torch.randn(4, 2, 16), torch.randn(4, 6)),
    )
    run = build_run(None, default_plan({"batch_size": 2}), device="cpu", workload=workload)
    batch = next(iter(run.loader))
    before = copy.deepcopy(run.setup.model.state_dict())
    random_state, generator_state = torch.random.get_rng_state(), run.generator.get_state()
    estimate_memory(run, 64, batch=batch, build_step=TrainStep)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert torch.equal(run.generator.get_state(), generator_state)
    assert run.setup.model.training
    assert not run.setup.optimizer.state
    assert all(p.grad is None for p in run.setup.model.parameters())
    after = run.setup.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    outcome = TrainStep(run)(iter([batch]), NullTimer())
    assert type(outcome.loss) is torch.Tensor, "what prepare keeps for later must not be fake"


class Refusing(nn.Linear):
    def __init__(self, change):
        super().__init__(WIDTH, 10)
        self.change = change

    def forward(self, x):
        return super().forward(self.change(x))


@pytest.mark.parametrize(
    ("change", "operator"),
    [
        (lambda x: x * (2.0 if x.sum().item() > 0 else 1.0), "aten._local_scalar_dense.default"),
        (lambda x: x[torch.nonzero(x.sum(dim=1) >= 0).squeeze(1)], "aten.nonzero.default"),
        (lambda x: torch.from_numpy(x.detach().numpy().copy()), None),
    ],
)
def test_code_that_needs_the_data_is_named_by_its_operator(change, operator):
    with pytest.raises(FakeRunError, match="real probes") as failed:
        estimate(build_workload(lambda: Refusing(change)))
    assert failed.value.operator == operator
    assert (operator or "") in str(failed.value)


def test_a_batch_without_rows_is_refused():
    run = build_run(None, default_plan({"batch_size": 2}), device="cpu", workload=build_workload())
    with pytest.raises(DataError, match="no tensor with rows"):
        estimate_memory(run, 8, batch=("text", 3), build_step=TrainStep)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("levers", [{}, {"precision": "bf16"}, {"activation_checkpointing": True}])
def test_on_a_gpu_it_agrees_with_the_allocator_within_ten_percent(levers):
    workload = build_workload()
    fake = estimate(workload, 4096, device="cuda", **levers)

    def measure(batch_size: int) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run = build_run(None, default_plan({"batch_size": 2, **levers}), device="cuda", workload=workload)
        step = TrainStep(dataclasses.replace(run, batch_size=batch_size))
        for _ in range(2):
            step(iter([grow(run, batch_size)]), NullTimer())
        return torch.cuda.max_memory_allocated() - before

    measure(2)  # the first steps of a process on an H200 took 73 MiB more
    real = measure(4096)
    # On an H200 it was 8 MiB lower, 6 and 9 %: most likely what an operator takes for itself; nobody looked it up.
    assert fake.total_bytes == pytest.approx(real, rel=0.1)
