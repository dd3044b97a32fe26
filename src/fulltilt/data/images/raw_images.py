"""The raw uint8 images of a dataset, for transforms on the device."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices, name_sample
from fulltilt.data.collate import fast_collate
from fulltilt.data.images.image_folder import ImageFolder
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.images.stl10 import Stl10
from fulltilt.data.transforms.pipeline import Raw
from fulltilt.errors import DataError


class RawImages(BatchedDataset):
    """The dataset ``source`` without its transform: a quarter of the bytes on the way to the device.

    Attributes:
        sample_shape: (C, H, W) behind the transform of the source, as a model sees it.

    Raises:
        DataError: The source is no dataset of uint8 images.
    """

    def __init__(self, source: Any):
        if not isinstance(source, MemoryImages | Stl10 | ImageFolder):
            raise DataError(
                f"{type(source).__name__} is no dataset of images in uint8; views are made of stl10, cifar10, "
                "image_folder or digits"
            )
        self.source = copy.copy(source)
        self.source.transform = Raw()
        self.name, self.targets = source.name, source.targets
        self.classes, self.n_classes = source.classes, source.n_classes
        self.sample_shape = source.sample_shape

    def __len__(self) -> int:
        return len(self.source)

    def get_batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Read (B, C, H, W) uint8 and (B,) int64; DataError where images differ in size."""
        source, rows = self.source, np.asarray(indices, dtype=np.int64) % len(self)  # -1 is the last one
        if not isinstance(source, ImageFolder):
            return source.get_batch(rows)
        images = [source.decode(row) for row in rows.tolist()]
        if len({image.shape for image in images}) > 1:
            raise DataError(
                "images of this folder differ in size, and views are made of batches of one size; write them once in "
                "one: fulltilt data make-stl10 SRC OUT --size 96 --labelled N"
            )
        return fast_collate(images), source.targets[torch.from_numpy(rows)]

    def name_sample(self, index: int) -> str:
        return name_sample(self.source, index)

    @property
    def placement(self) -> str:
        return getattr(self.source, "placement", "stream")

    @property
    def is_held(self) -> bool:
        return isinstance(self.source, MemoryImages)

    @property
    def held_bytes(self) -> int:
        return self.source.held_bytes

    def hold(self, device: torch.device, *, is_pinned: bool = False) -> RawImages:
        """Return the same images held on ``device``."""
        other = copy.copy(self)
        other.source = self.source.hold(device, is_pinned=is_pinned)
        return other
