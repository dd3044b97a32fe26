"""The workloads of ``batch_finders``: two models on handwritten digits whose speed has its peak inside the range.

Both hold far more activation than they compute: a memory limit is met at a batch that takes seconds, not minutes.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fulltilt import Workload
from fulltilt.tasks import build_model

N_CLASSES = 10
ENLARGE = 8  # 8×8 pixels become 64×64
N_TOKENS, PIXELS_PER_TOKEN, WIDTH, N_LAYERS = 16, 4, 32, 2
N_COPIES = 8  # of the 1,797 digits: the largest batch is to be a whole one


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload, the batch sizes of the space, and what a run may use on top of what is loaded at the start."""

    name: str
    target: str  # where tune finds the workload
    workload: Workload
    batch_sizes: tuple[int, ...]
    room_mib: int


class RowTransformer(nn.Module):
    """A transformer encoder over an image cut into pieces of a row. Shapes: B batch, F pixels, T tokens, D width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PIXELS_PER_TOKEN, WIDTH)
        shape = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = (nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, **shape) for _ in range(N_LAYERS))
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTH, N_CLASSES)

    def forward(self, x_BF: Tensor) -> Tensor:
        x_BTD = self.embed(x_BF.reshape(-1, N_TOKENS, PIXELS_PER_TOKEN))
        return self.head(self.layers(x_BTD).mean(dim=1))


def build_cnn() -> nn.Module:
    return nn.Sequential(nn.Upsample(scale_factor=ENLARGE), build_model("small_cnn(width=8)", where="model"))


def build_images() -> Dataset:
    pixels_NF, labels_N = read_digits()
    return TensorDataset(pixels_NF.reshape(-1, 1, 8, 8), labels_N)


def build_rows() -> Dataset:
    pixels_NF, labels_N = read_digits()
    return TensorDataset(pixels_NF.repeat(N_COPIES, 1), labels_N.repeat(N_COPIES))


def read_digits() -> tuple[Tensor, Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels.astype(np.float32) / 16), torch.from_numpy(labels)


build = functools.partial(Workload, loss=nn.CrossEntropyLoss(), optimizer=functools.partial(torch.optim.AdamW, lr=1e-3))
cnn = build(model=build_cnn, dataset=build_images, name="cnn")
transformer = build(model=RowTransformer, dataset=build_rows, name="transformer")
CASES = {
    name: Case(
        name=name,
        target=f"{__name__}:{workload.name}",
        workload=workload,
        batch_sizes=tuple(2**k for k in range(1, n_sizes + 1)),
        room_mib=room_mib,
    )
    for name, workload, n_sizes, room_mib in (
        ("digits 64×64, small CNN", cnn, 10, 384),
        ("digits, small transformer", transformer, 13, 512),
    )
}
