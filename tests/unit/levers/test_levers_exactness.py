"""What every lever says of exactness (``Lever.exactness``) holds in training runs; a lever without a case here fails.

Losses and weights of a small network (convolutions, BatchNorm, dropout) after two epochs, with the lever and without:
"equal" is to the last bit, "within tolerance" is that of the case, "another recipe" must come to another result.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fulltilt.data import DATASETS, build_pipeline
from fulltilt.data.batched import BatchedDataset
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers import Facts, default_plan, find_obstacles, load_catalogue
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

CATALOGUE = load_catalogue()
N_SAMPLES, N_CLASSES = 28, 3  # batches of 8 with a tail of 4
HAS_GPU = torch.cuda.is_available()
COMPILED_AS_EAGER = "test_compiled_losses_are_those_of_eager_mode_and_the_second_run_finds_its_code"


class Images(BatchedDataset):
    """Small images with noise from the generator that the loader hands out, as the own datasets augment."""

    noise = 0.1

    def __len__(self) -> int:
        return N_SAMPLES

    def get_batch(self, indices: Any, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        images = [torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(int(i))) for i in indices]
        noise_BCHW = self.noise * torch.randn(len(images), 2, 6, 6, generator=generator)
        return torch.stack(images) + noise_BCHW, torch.as_tensor(indices) % N_CLASSES


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return x_BCHW + self.drop(torch.relu(self.norm(self.conv(x_BCHW))))


class Network(nn.Module):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, dropout), Block(4, dropout))
        self.head = nn.Linear(4, N_CLASSES)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x_BCHW)).mean((2, 3)))


class Plain(nn.Module):
    """Without BatchNorm, whose statistics are of the micro-batch, and without dropout, whose draws follow it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.Tanh(), nn.Linear(8, N_CLASSES))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.layers(x_BCHW)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Values to hold against the default, in a plan with ``given``; ``device`` is where they exist."""

    values: tuple[Any, ...]
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    rtol: float = 1e-4
    device: str = "cpu"
    model: Any = Network
    dataset: Any = Images
    held_by: str = ""  # a test elsewhere in this folder, "file::function"


def build_pixels() -> MemoryImages:
    """Images with a pipeline in which nothing is random: what is, is drawn elsewhere and not the same."""
    pixels = torch.randint(0, 256, (N_SAMPLES, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pipeline = build_pipeline("normalize(mean=[0.4, 0.5], std=[0.2, 0.3])")
    return MemoryImages("own", pixels, torch.arange(N_SAMPLES) % N_CLASSES, classes="abc", transform=pipeline)


CASES = {
    "accumulate": Case(values=(2,), model=Plain),
    "activation_checkpointing": Case(values=(True, "blocks.1")),
    "batch_size": Case(values=(4,), model=Plain),
    "channels_last": Case(values=(True,), model=functools.partial(Network, dropout=0.0)),
    "compile": Case(values=(), held_by=f"test_levers_compile.py::{COMPILED_AS_EAGER}"),
    "cudnn_benchmark": Case(values=(True,), device="cuda"),
    "deterministic": Case(values=(True,)),
    "device_prefetch": Case(values=(True,), given={"pin_memory": True}, device="cuda"),
    "empty_cache_every": Case(values=("1 step", "1 epoch"), device="cuda"),
    "expandable_segments": Case(values=(True,), device="cuda"),
    "fused_optimizer": Case(values=(True,)),
    "num_workers": Case(values=(1, 2)),
    "persistent_workers": Case(values=(True,), given={"num_workers": 1}),
    "pin_memory": Case(values=(True,), device="cuda"),
    "placement": Case(values=("memory_map", "ram")),
    "precision": Case(values=("bf16", "fp16"), rtol=5e-2),
    "prefetch_factor": Case(values=(1, 4), given={"num_workers": 1}),
    "retain_freed_memory": Case(values=(), held_by="test_levers_retain_freed_memory.py::test_the_same_is_learned"),
    "threads": Case(values=(2,)),
    "transforms": Case(values=("device",), dataset=build_pixels),
    "worker_threads": Case(values=(2,), given={"num_workers": 1}),
}


def write_rows(folder: Path) -> Path:
    path = folder / "rows.h5"
    with h5py.File(path, "w") as file:
        file["input"] = np.random.default_rng(0).random((N_SAMPLES, 2, 6, 6), dtype=np.float32)
        file["label"] = np.arange(N_SAMPLES) % N_CLASSES
    return path


def train(case: Case, plan: dict[str, Any], *, dataset: Any = Images) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses of two epochs, and everything in the state dict at their end, in one row."""
    workload = Workload(
        model=case.model,
        dataset=dataset,
        loss=lambda outputs, targets: nn.functional.cross_entropy(outputs.float(), targets),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )
    full = default_plan({"batch_size": 8, "threads": 1} | case.given | plan)
    losses = []
    with build_run(None, full, device=case.device, workload=workload, seed=5) as run:
        step = TrainStep(run)
        for epoch in range(2):
            batches = run.start_epoch(epoch)
            while (outcome := step(batches, NullTimer())) is not None:
                losses.append(outcome.loss.float().cpu())
        for name in full:
            if full[name] is not None:
                assert CATALOGUE[name].observe(run.setup) == full[name], name
        weights = [value.detach().double().cpu().flatten() for value in run.setup.model.state_dict().values()]
    return torch.stack(losses), torch.cat(weights)


def hold(name: str, case: Case, dataset: Any = Images) -> None:
    """Train with the default and with each value, and hold the results against the lever's own statement."""
    lever = CATALOGUE[name]
    losses, weights = train(case, {}, dataset=dataset)
    for value in case.values:
        assert not lever.changes_recipe(value) or lever.exactness == "another recipe"
        mine, my_weights = train(case, {name: value}, dataset=dataset)
        if lever.exactness == "equal":
            assert torch.equal(losses, mine), value
            assert torch.equal(weights, my_weights), value
        elif lever.exactness == "within tolerance":
            torch.testing.assert_close(mine, losses, rtol=case.rtol, atol=case.rtol)
        else:
            assert my_weights.shape == weights.shape
            assert not torch.allclose(weights, my_weights, rtol=1e-3), value


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    torch.use_deterministic_algorithms(False)


def test_every_lever_has_a_case():
    assert CASES.keys() == CATALOGUE.keys()
    for case in CASES.values():
        file, _, function = case.held_by.partition("::")
        assert bool(case.values) is not bool(file)
        assert not file or f"def {function}(" in (Path(__file__).parent / file).read_text()


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=NEEDS_GPU if case.device == "cuda" else [])
        for name, case in CASES.items()
        if not case.held_by
    ],
)
def test_a_lever_is_as_exact_as_it_says(name, tmp_path):
    case = CASES[name]
    if name == "placement":
        path = write_rows(tmp_path)
        hold(name, case, dataset=lambda: DATASETS["hdf5"](path=str(path), val_fraction=0))
    else:
        hold(name, case, dataset=case.dataset)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.device == "cuda"])
def test_what_is_not_held_here_cannot_apply_here(name):
    for value in CASES[name].values:
        assert find_obstacles({name: value}, Facts(device_type="cpu"))


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 2), (2, 4)])
def test_accumulation_keeps_the_recipe_where_the_effective_batch_stays(batch_size, accumulate):
    """The statement behind "another recipe": the effective batch is what it changes, and nothing else."""
    case = Case(values=(), model=Plain, given={"num_workers": 0})
    whole, weights = train(case, {}, dataset=Quiet)
    parts, my_weights = train(case, {"batch_size": batch_size, "accumulate": accumulate}, dataset=Quiet)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(my_weights, weights, rtol=1e-3, atol=1e-5)


class Quiet(Images):
    noise = 0.0


def test_dropout_draws_in_the_order_of_memory():
    """Why the case of channels_last has no dropout: its masks are as good, and not the same."""
    case = CASES["channels_last"]
    with_dropout = dataclasses.replace(case, model=Network)
    losses, _ = train(with_dropout, {})
    assert not torch.allclose(losses, train(with_dropout, {"channels_last": True})[0], rtol=case.rtol)
    assert "Dropout" in CATALOGUE["channels_last"].doc


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_deterministic_reruns_are_bit_equal(device):
    case = dataclasses.replace(CASES["deterministic"], device=device)
    first, again = (train(case, {"deterministic": True, "num_workers": 1}) for _ in range(2))
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    other, _ = train(case, {"deterministic": True, "num_workers": 1, "batch_size": 7})
    assert not torch.equal(first[0][0], other[0]), "losses do depend on what the run does"
