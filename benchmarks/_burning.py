"""A workload with work added that is a known share of its own: what a comparison of two should find is known."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset

from fulltilt import Workload

N_SAMPLES, N_CHANNELS, SIDE_PX, N_CLASSES, WIDTH = 1024, 3, 8, 10, 32
N_ADDED = 65_536  # numbers that are added up at a time: enough for two threads

ReadClock = Callable[[], float]


def burn(seconds: float, read_s: ReadClock = time.thread_time) -> None:
    """Compute for so much time of this thread's CPU: what other work takes of the core does not count."""
    end_s = read_s() + seconds
    while read_s() < end_s:
        pass


class BurningNet(nn.Module):
    """A small convolutional network whose steps take ``1 + extra`` times the main thread's time of one without.

    What is added takes no memory and is of all threads, as a step is: a pause of one thread slowed down the rest of a
    step, and added forward passes sped it up.
    """

    def __init__(self, extra: float, read_s: ReadClock = time.thread_time):
        super().__init__()
        self._extra, self._owed_s = extra, 0.0
        self._read_s, self._end_s = read_s, read_s()
        self._numbers, self._sums = torch.ones(N_ADDED), torch.empty(N_ADDED)
        self.layers = nn.Sequential(
            nn.Conv2d(N_CHANNELS, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(WIDTH * SIDE_PX**2, N_CLASSES),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        # Since the last work ended: one step, as the backward pass of a CPU runs in the thread that calls it.
        now_s = self._read_s()
        self._owed_s += self._extra * (now_s - self._end_s)
        with torch.no_grad():
            while self._owed_s > 0:
                torch.add(self._numbers, 1.0, out=self._sums)
                before_s, now_s = now_s, self._read_s()
                self._owed_s -= now_s - before_s
        self._end_s = now_s
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
