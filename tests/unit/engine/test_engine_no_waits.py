"""Nothing in a step waits for the device: no value of a tensor is read on the host between two logging intervals."""

import contextlib
import dataclasses
import math
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from training_cases import build_config, build_workload, run_train

from fulltilt.config import config_from_values, plan_of
from fulltilt.data import prepare_text
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
from fulltilt.tasks.nt_xent import NtXent

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
TEXT = "the cat sat on the mat , and 3 dogs saw it .\nwhy would a dog not sit ?\n" * 30


def sgd(parameters):
    """Adam on the CPU reads its own step count on the host; on a GPU its foreach form does not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make_views(batch, generator):
    """Two noisy copies of every row, one after the other: what a contrastive loss compares."""
    rows, targets = batch
    rows = rows.repeat_interleave(2, dim=0)
    return rows + 0.1 * torch.randn(rows.shape, generator=generator, device=rows.device), targets


def compute_spread(outputs, targets):
    return outputs.std(1)


def build_case(case, folder, *, optimizer=sgd, **changes):
    """Configuration and workload: "cached" couples its samples, "language" has every metric that the task can have."""
    if case == "language":
        return build_language(folder, optimizer, changes)
    config = build_config(**changes | CASES[case])
    if case != "cached":
        return config, build_workload(optimizer=optimizer)
    contrastive = {"loss": NtXent(0.2), "prepare": make_views, "couples_samples": True, "validation": None}
    return config, build_workload(optimizer=optimizer, metrics={"spread": compute_spread}, **contrastive)


def build_language(folder, optimizer, changes):
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    prepare_text([folder / "text.txt"], folder / "tokens", force=True)
    values = {
        "task": "language_model(training_metrics=true, error_analysis=true)",
        "model": "bilm(depth=2, embedding=12, hidden=16, projection=8, dropout=0.1)",
        "data": {"dataset": "text(seq_len=8)", "path": str(folder / "tokens"), "batch_size": 16},
        "optim": {},
        "run": {"device": "cpu", "seed": 3},
    }
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
    config = config_from_values(values, base_dir=str(folder))
    return config, dataclasses.replace(build_configured(config), optimizer=optimizer)


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
    counts = []
    for epochs in (1, 3):
        config, workload = build_case(
            case,
            tmp_path,
            run__epochs=epochs,
            run__log_every_n_steps=1000,
            run__evaluate_every=None,
            run__checkpoint_every=None,
            optim__warmup=0,
        )
        with CountReads() as counter:
            run_train(tmp_path / str(epochs), config, workload=workload, training_metrics=training_metrics)
        counts.append(len(counter.reads))
    assert counts[1] - counts[0] == 2  # all figures of an epoch in one read, at its end


def read_item(tensor):
    return tensor.item()


@pytest.mark.parametrize("read", [read_item, float, bool, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy])
def test_the_counter_sees_every_way_to_read(read):
    with CountReads() as counter:
        read(torch.ones(3).sum())
    assert counter.reads


def build_step(run):
    """A step as the loop takes it, with metrics, sums and what a replan would need."""
    meter, last_step = LossMeter(run.device, run.workload.metrics), LastStep(run.setup.model)
    inner = build_train_step(run, observe=meter.observe)

    class Step:
        compute_loss = staticmethod(inner.compute_loss)

        def __call__(self, batches, timer):
            outcome = inner(batches, timer)
            last_step.keep()
            meter.add(outcome.loss, outcome.n_samples)
            meter.take()
            return outcome

    return Step()


def build_fake_step(run):
    """The copy of a run has neither the hooks of its optimizer nor a scaler that reads: here it has both."""
    if run.average is not None:
        run.setup.optimizer.register_step_post_hook(run.average.update)
    if run.setup.scaler is not None:
        run = dataclasses.replace(run, setup=dataclasses.replace(run.setup, scaler=torch.amp.GradScaler("cpu")))
    return build_step(run)


def take_fake_steps(case, folder, *, given=MappingProxyType({}), **changes):
    """Steps on tensors that hold no values: whatever asks for one fails. A GPU's choices are imitated."""
    config, workload = build_case(case, folder, **given)
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
    ("case", "changes"),
    [
        ("plain", {"loss": read_and_return_loss}),
        ("cached", {"metrics": {"reads": read_and_return_metric}}),
        ("language", {"metrics": {"reads": read_and_return_metric}}),
    ],
)
def test_a_loss_or_a_metric_that_reads_its_value_is_found(tmp_path, case, changes):
    with pytest.raises(FakeRunError, match="_local_scalar_dense"):
        take_fake_steps(case, tmp_path, **changes)


def test_fp16_without_a_fused_optimizer_is_the_step_that_waits(tmp_path):
    """The scaler asks the device whether a gradient overflowed; docs of ``fused_optimizer`` say so."""
    with pytest.raises(FakeRunError, match="_local_scalar_dense"):
        take_fake_steps("plain", tmp_path, given=FP16)


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


@contextlib.contextmanager
def refuse_waits():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_no_step_waits(tmp_path, case):
    config, workload = build_case(case, tmp_path, optimizer=None, data__pin_memory=True, run__device="cuda")
    plan = default_plan(dict(plan_of(config)))
    with build_run(config, plan, device="cuda", workload=workload) as run:
        step, batches = build_step(run), run.start_epoch(0)
        step(batches, NullTimer())
        with refuse_waits():
            outcomes = [step(batches, NullTimer()) for _ in range(2)]
        assert all(math.isfinite(outcome.loss.item()) for outcome in outcomes)
