"""A user's own workload, as one object: an MLP that reads handwritten digits as 64 numbers in a row."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fulltilt import Workload

N_FEATURES, N_CLASSES, WIDTH, DEPTH = 64, 10, 256, 3


def build_model() -> nn.Module:
    layers: list[nn.Module] = []
    for n_inputs in (N_FEATURES, *[WIDTH] * (DEPTH - 1)):
        layers += [nn.Linear(n_inputs, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, N_CLASSES))


def build_dataset() -> Dataset:
    pixels, labels = load_digits(return_X_y=True)
    return TensorDataset(torch.from_numpy(pixels.astype(np.float32) / 16), torch.from_numpy(labels))


workload = Workload(model=build_model, dataset=build_dataset, loss=nn.CrossEntropyLoss(), name="tabular_mlp")
