"""Extracts the features that an encoder gives of images, and holds them as a dataset.

Shapes: N images, F features, B batch.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from fulltilt.config.bad_samples import explain_unskipped
from fulltilt.errors import UsageError

BATCH_SIZE = 256


@torch.no_grad()
def extract_features(
    encode: Callable[[Tensor], Tensor],
    dataset: Any,
    rows: np.ndarray,
    device: torch.device,
    *,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return features (N, F) float32 and targets (N,) of the samples ``rows``, on the device.

    The dataset's own transform is applied and should not draw. The caller puts the encoder into evaluation mode.

    Raises:
        UsageError: no sample is asked for.
        DataError: one cannot be read.

    Cost: one forward of every image, in float32.
    """
    if not len(rows):
        raise UsageError("no image to encode: the list of samples is empty")
    features, targets = [], []
    for start in range(0, len(rows), batch_size):
        with explain_unskipped("images that are encoded for their features"):
            images, labels = dataset.get_batch(rows[start : start + batch_size])
        features.append(encode(images.to(device)).float())
        targets.append(labels)
        if progress is not None:
            progress(min(start + batch_size, len(rows)), len(rows))
    return torch.cat(features), torch.cat(targets).to(device)


def find_labelled(dataset: Any) -> np.ndarray:
    """Return the rows whose target is known; unlabelled ones have target -1."""
    return np.flatnonzero(np.asarray(dataset.targets) >= 0)


def spread(rows: np.ndarray, limit: int | None) -> np.ndarray:
    """Return at most ``limit`` of the rows, evenly spread over them."""
    if limit is None or len(rows) <= limit:
        return rows
    return rows[np.linspace(0, len(rows), limit, endpoint=False).astype(np.int64)]


class FeatureRows(TensorDataset):
    """A dataset of features (N, F) float32 with one target each, (N,) int64 below ``n_classes``."""

    name = "features"

    def __init__(self, features: Tensor, targets: Tensor, n_classes: int):
        super().__init__(features, targets)
        self.n_classes, self.sample_shape = n_classes, tuple(features.shape[1:])

    def get_batch(self, indices: list[int]) -> tuple[Tensor, ...]:
        """Return (B, F) float32 and (B,) int64."""
        return self[torch.as_tensor(indices)]


def standardise(features_NF: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Give every feature mean 0 and deviation 1, and scale ``others`` by the mean and deviation of the first."""
    mean_F, std_F = features_NF.mean(0), features_NF.std(0).clamp(min=1e-6)
    return tuple((features - mean_F) / std_F for features in (features_NF, *others))
