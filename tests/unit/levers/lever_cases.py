"""Runs of small networks that the tests of levers look into."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import nn

from fulltilt.data import DATASETS
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.build.run import Run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.levers import default_plan, load_catalogue
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

CATALOGUE = load_catalogue()
N_CLASSES = 3
NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


class Block(nn.Module):
    """A block of an image network that counts how often it computes."""

    def __init__(self, width: int = 4, dropout: float = 0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.drop = nn.Dropout(dropout)
        self.n_calls = 0

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        return x_BCHW + self.drop(torch.relu(self.norm(self.conv(x_BCHW))))


class Network(nn.Module):
    """Two blocks between a stem and a head, for images of two channels."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, dropout), Block(4, dropout))
        self.head = nn.Linear(4, N_CLASSES)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x_BCHW)).mean((2, 3)))


def write_rows(path: Path, labels: np.ndarray) -> tuple[np.ndarray, Callable[[], Any]]:
    """Write images with these labels into a file; return the images and what opens them as a dataset."""
    images = np.random.default_rng(0).random((len(labels), 2, 6, 6), dtype=np.float32)
    with h5py.File(path, "w") as file:
        file["input"], file["label"] = images, labels
    return images, functools.partial(DATASETS["hdf5"], path=str(path), val_fraction=0)


def compute_loss(logits_BK: torch.Tensor, targets_B: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits_BK.float(), targets_B)


def build(
    model: Any, dataset: Any, *, loss: Any = compute_loss, device: str = "cpu", optimizer: Any = None, **plan: Any
) -> Run:
    workload = Workload(model=model, dataset=dataset, validation=dataset, loss=loss, optimizer=optimizer)
    full = default_plan({"batch_size": 8, "threads": 1} | plan)
    return build_run(None, full, device=device, workload=workload, seed=5)


def take_steps(run: Run, n_steps: int | None = None, epoch: int = 0) -> list[float]:
    """Take the first steps of an epoch, or all of them, and return their losses."""
    step, batches, losses = TrainStep(run), run.start_epoch(epoch), []
    while len(losses) != n_steps and (outcome := step(batches, NullTimer())) is not None:
        losses.append(outcome.loss.item())
    assert n_steps in (None, len(losses))
    return losses


def compile_without_inductor(patch: pytest.MonkeyPatch) -> None:
    """Let graphs run as Dynamo found them: Inductor takes 10 s a graph, and a compiler."""
    patch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, *_, **options: graph.forward)
    patch.setattr("fulltilt.engine.build.facts.has_c_compiler", lambda: True)


def is_defined(test: str) -> bool:
    """Tell whether a test elsewhere in this folder, "file::function", is there."""
    file, _, function = test.partition("::")
    return f"def {function}(" in (Path(__file__).parent / file).read_text()


def observe(run: Run, name: str) -> Any:
    return CATALOGUE[name].observe(run.setup)
