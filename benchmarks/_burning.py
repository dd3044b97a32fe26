"""A workload with work added that is a known share of its own: what a comparison of two should find is known."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.data import Dataset

from fulltilt import Workload

N_SAMPLES, N_CHANNELS, SIDE_PX, N_CLASSES, WIDTH = 1024, 3, 8, 10, 32
LONGEST_S = 0.2  # that is paid for: a process that was stopped while another had its turn did not work,
MOST_CREDIT_S = 5e-3  # nor did it pay, where it was stopped while it paid

ReadClock = Callable[[], float]


def burn(seconds: float) -> None:
    """Compute for so much time of this thread's CPU: what other work takes of the core does not count."""
    end_s = time.thread_time() + seconds
    while time.thread_time() < end_s:
        pass


class Charge:
    """Adds work to other work of whatever length: both together take ``1 + extra`` times as long."""

    def __init__(self, extra: float, read_s: ReadClock):
        self.extra, self._read_s, self._end_s = extra, read_s, read_s()
        self._owed_s = 0.0

    def pay(self) -> None:
        """Compute until that makes up for what was done since the last payment."""
        now_s = self._read_s()
        self._owed_s += self.extra * min(now_s - self._end_s, LONGEST_S)
        while self._owed_s > 0:
            before_s, now_s = now_s, self._read_s()
            self._owed_s -= now_s - before_s
        self._owed_s = max(self._owed_s, -MOST_CREDIT_S)
        self._end_s = now_s


class BurningNet(nn.Module):
    """A small convolutional network whose steps take ``1 + extra`` times as long as those of one without.

    What is added is of one thread and takes no memory.
    """

    def __init__(self, extra: float, read_s: ReadClock = time.perf_counter):
        super().__init__()
        self.charge = Charge(extra, read_s)
        self.layers = nn.Sequential(
            nn.Conv2d(N_CHANNELS, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(WIDTH * SIDE_PX**2, N_CLASSES),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        self.charge.pay()  # since the last payment: one step, its backward pass too
        return self.layers(x_BCHW)


class BurningImages(Dataset):
    """Noise of which each sample takes so much CPU time, and ``1 + extra`` times as long as it does without."""

    def __init__(self, sample_s: float, extra: float, read_s: ReadClock = time.perf_counter):
        self._sample_s, self.charge = sample_s, Charge(extra, read_s)
        self._images = torch.randn(N_SAMPLES, N_CHANNELS, SIDE_PX, SIDE_PX, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        burn(self._sample_s)
        self.charge.pay()
        return self._images[index], index % N_CLASSES


def build(extra: float = 0.0, sample_s: float = 0.0) -> Workload:
    """Build the workload.

    Args:
        extra: Added to each step, or to each sample where these take time, as a share of it.
        sample_s: What the loader takes for each sample.
    """
    return Workload(
        model=lambda: BurningNet(0.0 if sample_s else extra),
        dataset=lambda: BurningImages(sample_s, extra if sample_s else 0.0),
        loss=nn.CrossEntropyLoss(),
        name="burning",
    )
