"""What levers for a GPU change there, seen inside a run's own steps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers import default_plan, load_catalogue
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
CATALOGUE = load_catalogue()
N_SAMPLES, N_FEATURES, BATCH_SIZE = 24, 512, 8
SCRATCH_BYTES = 256 * 2**20  # far more than what libraries keep for themselves from the first step on
TF32_GAP = 1e-5  # fp32 rounds at 6e-8, TF32 at 5e-4


@pytest.fixture(autouse=True)
def _keep_what_is_the_process_own():
    precision, benchmark = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark = benchmark


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


def compute_loss(outputs_BP: Tensor, targets_B: Tensor) -> Tensor:
    return outputs_BP.square().mean()


def build(**plan: Any) -> Run:
    workload = Workload(model=Product, dataset=build_rows, loss=compute_loss)
    return build_run(None, default_plan({"batch_size": BATCH_SIZE} | plan), device="cuda", workload=workload)


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
    assert len(pinned) == N_SAMPLES // BATCH_SIZE
    return pinned


def observe(run: Run, name: str) -> Any:
    return CATALOGUE[name].observe(run.setup)


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
def test_batches_lie_in_pinned_memory_and_steps_have_the_flag_of_cudnn_where_that_was_asked_for(value):
    torch.backends.cudnn.benchmark = not value
    with build(pin_memory=value, cudnn_benchmark=value) as run:
        assert set(train(run)) == {value}
        assert set(run.setup.model.flags) == {value}
        assert observe(run, "pin_memory") is observe(run, "cudnn_benchmark") is value
