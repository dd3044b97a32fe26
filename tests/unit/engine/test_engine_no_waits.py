"""Nothing in a step waits for the device: no value of a tensor is read on the host between two logging intervals."""

import dataclasses
import math

import pytest
import torch
from step_cases import build_language_config, make_views
from torch import nn
from torch.overrides import TorchFunctionMode
from training_cases import build_config, build_workload, run_train

from fulltilt.config import plan_of
from fulltilt.engine import build_workload as build_configured
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.loop.progress import LossMeter
from fulltilt.engine.loop.sizes import LastStep
from fulltilt.engine.step.cached_step import CachedStep
from fulltilt.engine.step.cached_step import build_step as build_train_step
from fulltilt.errors import FakeRunError
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer
from fulltilt.measure.fake_memory import estimate_memory
from fulltilt.tasks.losses import NtXent

WINDOW = {"data__batch_size": 8, "speed__accumulate": 2}
FP16 = {"speed__precision": "fp16", "optim__clip_norm": 1.0}
CASES = {
    "plain": {},
    "accumulate": WINDOW,
    "bf16": {"speed__precision": "bf16"},
    "clipping": {"optim__clip_norm": 1.0},
    "cached": WINDOW,
    "ema": {"optim__ema": 0.9},
    "fp16 fused": WINDOW | FP16 | {"speed__fused_optimizer": True},
    "language": {},
}


def sgd(parameters):
    """Adam on the CPU reads its own step count on the host; on a GPU its foreach form does not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def compute_spread(outputs, targets):
    return outputs.std(1)


def build_case(case, folder, *, optimizer=sgd, **changes):
    """Configuration and workload: "cached" couples its samples, "language" has every metric that the task can have."""
    if case == "language":
        config = build_language_config(folder, **changes)
        return config, dataclasses.replace(build_configured(config), optimizer=optimizer)
    config = build_config(**changes | CASES[case])
    if case != "cached":
        return config, build_workload(optimizer=optimizer)
    contrastive = {"loss": NtXent(0.2), "prepare": make_views, "couples_samples": True, "validation": None}
    return config, build_workload(optimizer=optimizer, metrics={"spread": compute_spread}, **contrastive)


class CountReads(TorchFunctionMode):
    """Counts what brings a floating-point value to the host; whole numbers are the loader's own.

    A copy with ``to`` is no wait where device and host are one; on a GPU torch's own debug mode sees it.
    """

    READERS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")

    def __init__(self):
        super().__init__()
        self.reads = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.READERS and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            self.reads.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("training_metrics", [False, True])
def test_more_steps_read_nothing_more(tmp_path, case, training_metrics):
    never = {"run__log_every_n_steps": 1000, "run__evaluate_every": None, "run__checkpoint_every": None}
    counts = []
    for epochs in (1, 3):
        config, workload = build_case(case, tmp_path, run__epochs=epochs, optim__warmup=0, **never)
        with CountReads() as counter:
            run_train(tmp_path / str(epochs), config, workload=workload, training_metrics=training_metrics)
        counts.append(len(counter.reads))
    assert counts[1] - counts[0] == 2  # all figures of an epoch in one read, at its end


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, float, bool, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy]
)
def test_the_counter_sees_every_way_to_read(read):
    with CountReads() as counter:
        read(torch.ones(3).sum())
    assert counter.reads


def build_step(run):
    """A step as the loop takes it, with metrics, sums and what a replan would need."""
    meter, last_step = LossMeter(run.device, run.workload.metrics), LastStep(run.setup.model)
    inner = build_train_step(run, observe=meter.observe)

    def step(batches, timer):
        outcome = inner(batches, timer)
        last_step.keep()
        meter.add(outcome.loss, outcome.n_samples)
        meter.take()
        return outcome

    step.compute_loss = inner.compute_loss
    return step


def build_fake_step(run):
    """The copy of a run has neither the hooks of its optimizer nor a scaler that reads: here it has both."""
    if run.average is not None:
        run.setup.optimizer.register_step_post_hook(run.average.update)
    if run.setup.scaler is not None:
        run = dataclasses.replace(run, setup=dataclasses.replace(run.setup, scaler=torch.amp.GradScaler("cpu")))
    return build_step(run)


def take_fake_steps(case, folder, *, given=None, **changes):
    """Steps on tensors that hold no values: whatever asks for one fails. A GPU's choices are imitated."""
    config, workload = build_case(case, folder, **given or {})
    workload = dataclasses.replace(workload, **changes)
    with build_run(config, plan_of(config), device="cpu", workload=workload) as run:
        batch = next(run.start_epoch(0))
        return estimate_memory(run, run.batch_size, batch=batch, build_step=build_fake_step, imitate="cuda")


@pytest.mark.parametrize("case", CASES)
def test_on_tensors_without_values_every_step_can_be_taken(tmp_path, case):
    assert take_fake_steps(case, tmp_path).activations_bytes > 0


def read_and_return_loss(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets)
    return loss if loss.item() < 100 else loss * 0


def read_and_return_metric(outputs, targets):
    value = outputs.loss if hasattr(outputs, "loss") else outputs.sum()
    return torch.full((1,), value.item())


@pytest.mark.parametrize(
    ("case", "given", "changes"),
    [
        ("plain", {}, {"loss": read_and_return_loss}),
        ("cached", {}, {"metrics": {"reads": read_and_return_metric}}),
        ("language", {}, {"metrics": {"reads": read_and_return_metric}}),
        # The scaler asks the device whether a gradient overflowed; docs of ``fused_optimizer`` say so.
        pytest.param("plain", FP16, {}, id="fp16 without a fused optimizer"),
    ],
)
def test_a_step_that_reads_a_value_is_found(tmp_path, case, given, changes):
    with pytest.raises(FakeRunError, match="_local_scalar_dense"):
        take_fake_steps(case, tmp_path, given=given, **changes)


def test_the_cases_take_the_steps_that_they_are_named_after(tmp_path):
    for case, is_as_named in (
        ("cached", lambda run: isinstance(build_train_step(run), CachedStep)),
        ("ema", lambda run: run.average is not None),
        ("fp16 fused", lambda run: run.setup.scaler is not None and run.setup.optimizer.defaults["fused"]),
        ("language", lambda run: any(name.startswith("miss/") for name in run.workload.metrics)),
    ):
        config, workload = build_case(case, tmp_path)
        with build_run(config, plan_of(config), device="cpu", workload=workload) as run:
            assert is_as_named(run), case


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_no_step_waits(tmp_path, case):
    config, workload = build_case(case, tmp_path, optimizer=None, data__pin_memory=True, run__device="cuda")
    plan = default_plan(dict(plan_of(config)))
    with build_run(config, plan, device="cuda", workload=workload) as run:
        step, batches = build_step(run), run.start_epoch(0)
        step(batches, NullTimer())
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes = [step(batches, NullTimer()) for _ in range(2)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(math.isfinite(outcome.loss.item()) for outcome in outcomes)
