"""A run whose step takes much more memory than its model: ``OUT_DIR BATCH_SIZE ACCUMULATE [--spare-mib N]``.

``--spare-mib`` limits the process to what it uses at its start and so much more. Prints every loss, and every replan.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from train_slowly import say

from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.hardware import read_rss_bytes
from fulltilt.tasks import Workload

WIDTH = 250_000  # floats that a sample is spread over: 64 MB for a batch of 64


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.weight).mean(1, keepdim=True)


def build_points() -> TensorDataset:
    x = torch.linspace(-1, 1, 128).unsqueeze(1)
    return TensorDataset(x, 0.3 * x)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out_dir")
    parser.add_argument("batch_size", type=int)
    parser.add_argument("accumulate", type=int)
    parser.add_argument("--spare-mib", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    run = {"epochs": 1, "device": "cpu", "log_every_n_steps": 1}
    values = {"data": {"batch_size": args.batch_size}, "speed": {"accumulate": args.accumulate}, "run": run}
    config = config_from_values(values, base_dir=".")
    workload = Workload(
        model=Spread,
        dataset=build_points,
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        name="spread",
    )
    limit = None
    if args.spare_mib is not None:
        limit = (read_rss_bytes(os.getpid()) or 0) + args.spare_mib * 2**20
    train(config, out_dir=args.out_dir, listeners=[say], workload=workload, memory_limit_bytes=limit)
    return 0


if __name__ == "__main__":
    sys.exit(main())
