"""A workload with work added that is a known share of its own: what a comparison of two should find is known."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset

from fulltilt import Workload

N_SAMPLES, N_CHANNELS, SIDE_PX, N_CLASSES, WIDTH = 1024, 3, 8, 10, 32
N_LATEST = 9  # steps whose median is what a step takes: after a turn of another process one takes half as long again
BASE_SHARE = 0.25  # burnt by every step: a pause in which idle threads fall asleep is then no part of a difference

ReadClock = Callable[[], float]


def burn(seconds: float, read_s: ReadClock = time.thread_time) -> None:
    """Compute for so much time of this thread's CPU: what other work takes of the core does not count."""
    end_s = read_s() + seconds
    while read_s() < end_s:
        pass


class BurningNet(nn.Module):
    """A small convolutional network whose steps take ``1 + extra`` times the main thread's time of one without."""

    def __init__(self, extra: float, read_s: ReadClock = time.thread_time):
        super().__init__()
        self._share = (1 + BASE_SHARE) * (1 + extra) - 1
        self._read_s, self._end_s = read_s, read_s()
        self._latest_s: deque[float] = deque(maxlen=N_LATEST)
        self.layers = nn.Sequential(
            nn.Conv2d(N_CHANNELS, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(WIDTH * SIDE_PX**2, N_CLASSES),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        # Since the last burning ended: one step, as the backward pass of a CPU runs in the thread that calls it.
        self._latest_s.append(self._read_s() - self._end_s)
        burn(self._share * statistics.median(self._latest_s), self._read_s)
        self._end_s = self._read_s()
        return self.layers(x_BCHW)


class BurningImages(Dataset):
    """Noise of which each sample takes so much CPU time."""

    def __init__(self, sample_s: float):
        self._sample_s = sample_s
        self._images = torch.randn(N_SAMPLES, N_CHANNELS, SIDE_PX, SIDE_PX, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        burn(self._sample_s)
        return self._images[index], index % N_CLASSES


def build(extra: float = 0.0, sample_s: float = 0.0) -> Workload:
    """Build the workload.

    Args:
        extra: Added to each step, as a share of it.
        sample_s: What the loader takes for each sample.
    """
    return Workload(
        model=lambda: BurningNet(extra),
        dataset=lambda: BurningImages(sample_s),
        loss=nn.CrossEntropyLoss(),
        name="burning",
    )
