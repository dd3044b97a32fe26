"""What levers for a GPU change there, seen inside a run's own steps."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.levers import lever_cases
from tests.unit.levers.lever_cases import NEEDS_GPU, observe, take_steps, write_rows
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.hardware import has_c_compiler
from fulltilt.levers import find_reports
from fulltilt.measure import NullTimer

pytestmark = NEEDS_GPU
N_SAMPLES, N_FEATURES = 24, 512
SCRATCH_BYTES = 256 * 2**20  # far more than what libraries keep for themselves from the first step on
TF32_GAP = 1e-5  # fp32 rounds at 6e-8, TF32 at 5e-4


def build_rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(N_SAMPLES, N_FEATURES, generator=generator), torch.zeros(N_SAMPLES))


class Product(nn.Module):
    """A matrix product that notes its distance from the exact one, the process' flags and memory.

    It takes scratch memory as an operator does; its convolution is what ``cudnn_benchmark`` asks for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(N_FEATURES, N_FEATURES, bias=False)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.gaps: list[float] = []
        self.flags: list[bool] = []
        self.reserved_bytes: list[int] = []

    def forward(self, x_BP: Tensor) -> Tensor:
        self.reserved_bytes.append(torch.cuda.memory_reserved())
        self.flags.append(torch.backends.cudnn.benchmark)
        out_BP = self.layer(x_BP)
        with torch.no_grad():
            exact_BP = x_BP.double() @ self.layer.weight.double().T
            self.gaps.append(float((out_BP.double() - exact_BP).norm() / exact_BP.norm()))
            torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=x_BP.device)
        return self.conv(out_BP[:, None])[:, 0]


def build_convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )  # fmt: skip


def build(**plan: Any) -> Run:
    return lever_cases.build(
        Product, build_rows, loss=lambda outputs_BP, _: outputs_BP.square().mean(), device="cuda", **plan
    )


def train(run: Run) -> list[bool]:
    """An epoch; for every batch that a step was given, whether it lay in pinned memory."""
    pinned: list[bool] = []

    def watch(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            pinned.append(batch[0].is_pinned())
            yield batch

    step, batches = TrainStep(run), watch(run.start_epoch(0))
    while step(batches, NullTimer()) is not None:
        pass
    assert len(pinned) == 3
    return pinned


def test_products_of_a_tf32_run_are_rounded_as_tf32_is():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("TF32 exists from compute capability 8.0 on")
    with build(precision="tf32") as run:
        train(run)
        assert observe(run, "precision") == "tf32"
        assert all(TF32_GAP < gap < 1e-2 for gap in run.setup.model.gaps)
    with build(precision="fp32") as run:
        train(run)
        assert observe(run, "precision") == "fp32"
        assert all(gap < TF32_GAP for gap in run.setup.model.gaps), "an earlier plan's tf32 does not reach these steps"


@pytest.mark.skipif(not has_c_compiler(), reason="torch.compile needs a C++ compiler")
def test_steps_replayed_as_cuda_graphs_learn_as_those_of_eager_mode(tmp_path):
    from torch._dynamo.utils import counters

    def train_epochs(value: bool | str) -> list[float]:
        with lever_cases.build(build_convolution, dataset, device="cuda", compile=value) as run:
            losses = [loss for epoch in range(4) for loss in take_steps(run, epoch=epoch)]
            assert observe(run, "compile") == value
            return losses

    _, dataset = write_rows(tmp_path / "f.h5", np.arange(36) % 3)  # each epoch ends with a batch of another size
    counters.clear()
    torch.testing.assert_close(train_epochs("reduce-overhead"), train_epochs(False), rtol=1e-2, atol=1e-3)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize(("value", "keeps"), [(None, True), ("1 step", False)])
def test_unused_memory_goes_back_between_steps(value, keeps):
    torch.cuda.empty_cache()
    with build(empty_cache_every=value) as run:
        train(run)
        before, *later = run.setup.model.reserved_bytes
        assert len(later) == 2
        assert all((reserved - before >= SCRATCH_BYTES) is keeps for reserved in later)
        assert observe(run, "empty_cache_every") == value


@pytest.mark.parametrize("value", [False, True])
def test_segments_expand_where_that_was_asked_for(value):
    torch.cuda.empty_cache()
    with build(expandable_segments=value, empty_cache_every="1 step") as run:
        train(run)
        assert observe(run, "expandable_segments") is value
        assert "3 calls took" in find_reports(run.plan, run.setup)[0]


@pytest.mark.parametrize("value", [False, True])
def test_batches_lie_in_pinned_memory_and_steps_have_the_flag_of_cudnn_where_that_was_asked_for(value):
    torch.backends.cudnn.benchmark = not value
    with build(pin_memory=value, cudnn_benchmark=value) as run:
        assert set(train(run)) == {value}
        assert set(run.setup.model.flags) == {value}
        assert observe(run, "pin_memory") is observe(run, "cudnn_benchmark") is value


@pytest.mark.parametrize(
    ("placement", "pin_memory", "where"), [("device", False, "cuda"), ("ram", True, "cpu"), ("ram", False, "cpu")]
)
def test_rows_lie_on_the_gpu_or_are_gathered_into_pinned_memory(tmp_path, placement, pin_memory, where):
    images, dataset = write_rows(tmp_path / "f.h5", np.arange(32))
    plan = {"placement": placement, "pin_memory": pin_memory}
    with lever_cases.build(build_flat, dataset, device="cuda", **plan) as run:
        assert observe(run, "placement") == placement
        inputs, rows = next(run.start_epoch(0))
        assert inputs.device.type == where
        assert inputs.is_pinned() is pin_memory
        assert np.array_equal(inputs.cpu().numpy(), images[rows.cpu().numpy()])
        assert np.isfinite(take_steps(run, 1, epoch=1)).all()


def build_flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 32))
