"""The images of a dataset as they are held, in uint8, for what transforms them on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.collate import fast_collate
from fulltilt.data.image_folder import ImageFolder
from fulltilt.data.images import MemoryImages, decode_image
from fulltilt.data.stl10 import Stl10
from fulltilt.errors import DataError


class RawImages(BatchedDataset):
    """Without its transform, a quarter of the bytes on the way to the device.

    Attributes:
        source: The dataset; its transform is not applied.
        name, targets, classes, n_classes: Those of the source.
        sample_shape: (C, H, W) as a model sees it, after the transform of the source.

    Raises:
        DataError: the dataset is none of images that are held or decoded here.
    """

    def __init__(self, source: Any):
        if not isinstance(source, MemoryImages | Stl10 | ImageFolder):
            raise DataError(
                f"{type(source).__name__} is no dataset of images in uint8; views are made of stl10, cifar10, "
                "image_folder or digits"
            )
        self.source = source
        self.name, self.targets = source.name, source.targets
        self.classes, self.n_classes = source.classes, source.n_classes
        self.sample_shape = source.sample_shape

    def __len__(self) -> int:
        return len(self.source)

    def get_batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) uint8 and (B,) int64.

        Raises:
            DataError: A file is damaged (names it), or images differ in size.
        """
        source = self.source
        if isinstance(source, Stl10):
            return source.get_raw_batch(indices)
        rows = torch.as_tensor(indices) % len(source)
        if isinstance(source, MemoryImages):
            return source.images.index_select(0, rows), source.targets[rows]
        images = [decode_image(str(source.files[row]), mode=source.mode) for row in rows.tolist()]
        if len({image.shape for image in images}) > 1:
            raise DataError(
                "images of this folder differ in size, and views are made of batches of one size; write them once in "
                "one: fulltilt data make-stl10 SRC OUT --size 96"
            )
        return fast_collate(images), source.targets[rows]
