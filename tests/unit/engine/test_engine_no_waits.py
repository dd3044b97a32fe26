"""Nothing in a step waits for the device: no value of a tensor is read on the host between two logging intervals."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from training_cases import build_config, build_workload, is_right, run_train

from fulltilt.config import plan_of
from fulltilt.engine.build import build_run
from fulltilt.engine.progress import LossMeter
from fulltilt.engine.replan import LastStep
from fulltilt.engine.step import TrainStep
from fulltilt.errors import FakeRunError
from fulltilt.levers import default_plan
from fulltilt.measure.fake_memory import estimate_memory

CASES = {
    "plain": {},
    "accumulate": {"data__batch_size": 8, "speed__accumulate": 2},
    "bf16": {"speed__precision": "bf16"},
    "clipping": {"optim__clip_norm": 1.0},
}


def sgd(parameters):
    """Adam on the CPU reads its own step count on the host; on a GPU its foreach form does not."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


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
        config = build_config(
            run__epochs=epochs,
            run__log_every_n_steps=1000,
            run__evaluate_every=None,
            run__checkpoint_every=None,
            optim__warmup=0,
            **CASES[case],
        )
        with CountReads() as counter:
            run_train(
                tmp_path / str(epochs),
                config,
                workload=build_workload(optimizer=sgd),
                training_metrics=training_metrics,
            )
        counts.append(len(counter.reads))
    n_per_epoch = 2 if training_metrics else 1  # the sums, read at the end of an epoch
    assert counts[1] - counts[0] == 2 * n_per_epoch


def read_item(tensor):
    return tensor.item()


@pytest.mark.parametrize("read", [read_item, float, bool, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy])
def test_the_counter_sees_every_way_to_read(read):
    with CountReads() as counter:
        read(torch.ones(3).sum())
    assert counter.reads


def build_step(run):
    """A step as the loop takes it, with metrics, sums and what a replan would need."""
    meter, last_step = LossMeter(run.device, {"accuracy": is_right}), LastStep(run.setup.model)
    inner = TrainStep(run, observe=meter.observe)

    class Step:
        compute_loss = staticmethod(inner.compute_loss)

        def __call__(self, batches, timer):
            outcome = inner(batches, timer)
            last_step.keep()
            meter.add(outcome.loss, outcome.n_samples)
            meter.take()

    return Step()


def take_fake_steps(case, **changes):
    """Steps on tensors that hold no values: whatever asks for one fails. A GPU's choices are imitated."""
    config = build_config(**CASES[case])
    with build_run(config, plan_of(config), device="cpu", workload=build_workload(optimizer=sgd, **changes)) as run:
        batch = next(run.start_epoch(0))
        return estimate_memory(run, run.batch_size, batch=batch, build_step=build_step, imitate="cuda")


@pytest.mark.parametrize("case", CASES)
def test_on_tensors_without_values_every_step_can_be_taken(case):
    assert take_fake_steps(case).activations_bytes > 0


def test_a_loss_that_reads_its_value_is_found():
    def reads(outputs, targets):
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss if loss.item() < 100 else loss * 0

    with pytest.raises(FakeRunError, match="_local_scalar_dense"):
        take_fake_steps("plain", loss=reads)


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
def test_on_a_gpu_no_step_waits(case):
    config = build_config(data__pin_memory=True, run__device="cuda", **CASES[case])
    plan = default_plan(dict(plan_of(config)))
    with build_run(config, plan, device="cuda", workload=build_workload(optimizer=None)) as run:
        step, batches = build_step(run), run.start_epoch(0)
        step(batches, _Silent())
        with refuse_waits():
            outcomes = [step(batches, _Silent()) for _ in range(2)]
        assert all(math.isfinite(outcome.loss.item()) for outcome in outcomes)


class _Silent:
    def lap(self, phase):
        pass
