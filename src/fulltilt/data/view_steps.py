"""Steps that views of contrastive learning need beside those of ``transform_steps``.

Legend of shape suffixes: B batch, C channels, H height, W width.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from fulltilt.data.transform_steps import Generator, Grayscale, Step
from fulltilt.errors import DataError


@dataclasses.dataclass(frozen=True)
class RandomGrayscale:
    """Some of the images without their colours; the number of channels stays."""

    probability: float

    def __call__(self, x_BCHW: Tensor, generator: Generator) -> Tensor:
        chosen_B = torch.rand(len(x_BCHW), generator=generator, device=x_BCHW.device) < self.probability
        gray_BCHW = Grayscale(x_BCHW.shape[1])(x_BCHW, generator)
        return torch.where(chosen_B[:, None, None, None], gray_BCHW, x_BCHW)


def random_grayscale(probability: float = 0.1) -> Step:
    if not 0 <= probability <= 1:
        raise DataError(f"random_grayscale: probability {probability} is not between 0 and 1")
    return RandomGrayscale(probability)
