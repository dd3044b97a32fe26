"""A workload whose batches take memory: a few MiB a sample in one layer, or more than there is."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt import Workload


class Wide(nn.Module):
    def __init__(self, n_copies):
        super().__init__()
        self.n_copies, self.scale = n_copies, nn.Parameter(torch.ones(1))

    def forward(self, x):
        wide = (x.repeat(1, self.n_copies) * self.scale).exp()  # what backward needs stays: two times 2 MiB a sample
        return (wide * self.scale).sin().mean(1, keepdim=True)


def build(n_copies):
    def dataset():
        return TensorDataset(torch.rand(512, 64), torch.rand(512, 1))

    return Workload(model=lambda: Wide(n_copies), dataset=dataset, loss=nn.MSELoss())


workload, huge = build(8192), build(8192 * 256)
