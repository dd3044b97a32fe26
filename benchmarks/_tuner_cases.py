"""The workloads of ``tuner_peers``: each is held up by something else, and none needs a file that is not here."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from benchmarks._peers_workloads import RowTransformer, build, read_digits
from benchmarks._runner import ROOT
from fulltilt.config import Config
from fulltilt.engine.build.assemble import build_workload
from fulltilt.tasks import Workload, build_model
from fulltilt.tuner.question.source import resolve_target

SIDE = 24  # of an image that was turned
MAX_TURN_DEG = 15.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A workload by the name under which ``tune`` finds it; the user's own settings are those of its configuration."""

    name: str
    target: str

    def resolve(self, device: str) -> Config:
        return resolve_target(self.target, {"run.device": device}).config

    def build_workload(self, device: str) -> Workload:
        return build_workload(self.resolve(device))


class TurnedDigits(Dataset[tuple[Tensor, Tensor]]):
    """Digits that are enlarged and turned whenever they are read: one takes longer to make than to train on."""

    def __init__(self) -> None:
        pixels_NF, self._labels_N = read_digits()
        self._images_N = pixels_NF.reshape(-1, 8, 8).numpy()

    def __len__(self) -> int:
        return len(self._images_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        degrees = np.random.default_rng(index).uniform(-MAX_TURN_DEG, MAX_TURN_DEG)
        image_HW = ndimage.zoom(self._images_N[index], SIDE / 8, order=1)
        image_HW = ndimage.rotate(image_HW, degrees, reshape=False, order=1)
        return torch.from_numpy(image_HW[None]), self._labels_N[index]


def build_rows() -> Dataset:
    return TensorDataset(*read_digits())


def build_small_cnn() -> nn.Module:
    return build_model("small_cnn(width=8)", where="model")


small_ops = build(model=RowTransformer, dataset=build_rows, name="small_ops")
slow_data = build(model=build_small_cnn, dataset=TurnedDigits, name="slow_data")
CASES = {
    case.name: case
    for case in (
        Case(name="digits, CNN", target=str(ROOT / "configs" / "digits.yaml")),
        Case(name="digits, small transformer", target=f"{__name__}:small_ops"),
        Case(name="digits turned as they are read", target=f"{__name__}:slow_data"),
    )
}
