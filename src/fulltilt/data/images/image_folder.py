"""Read images and classes from a folder that holds one folder per class."""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.images.image_sets import (
    IMAGE_SUFFIXES,
    MemoryImages,
    decode_image,
    import_pillow,
    is_image,
    list_folders,
)
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, check_split, split_stratified
from fulltilt.data.transforms.pipeline import (
    PerImage,
    Pipeline,
    Transform,
    join_images,
    read_sample_shape,
    resolve_transform,
)
from fulltilt.errors import DataError
from fulltilt.hardware import count_usable_cores

_VAL_FOLDERS = ("val", "valid", "validation", "test")
_N_TRIES = 10  # files that may be damaged before the first whole one


def image_folder(
    split: Split = "train",
    transform: Transform = None,
    path: str | None = None,
    root: str = "data",
    mode: Literal["RGB", "L"] = "RGB",
    val_fraction: float = 0.2,
    seed: int = 0,
    base_dir: str | None = None,
) -> "ImageFolder":
    """Build a dataset of ``path/train/<class>`` or ``path/val/<class>`` (or valid, validation, test); it decodes later.

    Without those folders, ``path/<class>`` is split: ``val_fraction`` of every class, drawn with ``seed``; 0 gives all
    images to training, 1 to validation.

    Args:
        transform: Images that differ in size need one that resizes.
        path: The folder; ``root`` is used without it.
        mode: ``RGB``, or ``L`` for one channel.

    Raises:
        DataError: No such folder, no classes, a class without images.
    """
    check_split(split)
    import_pillow()
    folder = resolve_path(path or root, base_dir)
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the one that holds train/<class>/ or <class>/")
    own = _find_split_folder(folder, split)
    files, targets, classes = _list_images(own or folder)
    if own is None:
        rows = split_stratified(targets, split, val_fraction=val_fraction, seed=seed, what=str(folder))
        files, targets = files[rows], targets[rows]
    elif split == "val":
        targets, classes = _match_classes(folder / "train", own, targets, classes)
    return ImageFolder(
        files, targets, classes=classes, mode=mode, transform=resolve_transform(transform, base_dir=base_dir)
    )


class ImageFolder(BatchedDataset):
    """Decodes images when they are read; ``hold`` returns a dataset that has all of them in memory.

    Attributes:
        files: (N,) paths, one array of text: a list would be copied page by page into every worker.
        sample_shape: (C, H, W) of the first sample after the transform.
    """

    name = "image_folder"
    yields_pixels = sizes_images = True

    def __init__(
        self, files: np.ndarray, targets: np.ndarray, *, classes: Sequence[str], mode: str, transform: Callable | None
    ):
        self.files, self.targets = files, torch.from_numpy(targets)
        self.classes, self.n_classes = tuple(classes), len(classes)
        self.mode, self.transform = mode, transform
        self.sample_shape = read_sample_shape(lambda: self[self._find_first()][0])

    def __len__(self) -> int:
        return len(self.files)

    def get_batch(self, indices: Indices, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read a batch: (B, C, H, W) float32, or uint8 where the transform comes later, and (B,) int64."""
        images = [self.decode(index) for index in indices]
        return join_images(self.transform, images, generator), self.targets[torch.as_tensor(indices)]

    def decode(self, index: int) -> Tensor:
        """Decode one image (C, H, W) uint8."""
        return decode_image(str(self.files[index]), mode=self.mode)

    def name_sample(self, index: int) -> str:
        return str(self.files[index])

    @property
    def held_bytes(self) -> int:
        """Return the bytes that ``hold`` would take: all images at the first one's size, and their classes."""
        shape = self._hold_image(self._find_first()).shape
        return len(self) * (math.prod(shape) + self.targets.element_size())

    def hold(self, device: torch.device, *, is_pinned: bool = False) -> MemoryImages:
        """Decode all images once into one tensor on ``device``; resizing steps without randomness run once too.

        Cost: reads and decodes all files, on up to 4 threads.
        """
        first_CHW = self._hold_image(self._find_first())
        images_NCHW = torch.empty((len(self), *first_CHW.shape), dtype=torch.uint8)

        def fill(index: int) -> None:
            image_CHW = self._hold_image(index)
            if image_CHW.shape != first_CHW.shape:
                raise DataError(
                    f"{self.files[index]} is {_describe_size(image_CHW)} and the first image "
                    f"{_describe_size(first_CHW)}: images of different size cannot be held as one table; begin "
                    "data.transform with resize(…), or use placement stream"
                )
            images_NCHW[index] = image_CHW

        with ThreadPoolExecutor(min(4, count_usable_cores())) as pool:
            for _ in pool.map(fill, range(len(self))):
                pass
        sizing, rest = self._split_sizing()
        transform = rest if sizing.steps else self.transform
        whole = MemoryImages(self.name, images_NCHW, self.targets, classes=self.classes, transform=transform)
        return whole.hold(device, is_pinned=is_pinned)

    def _hold_image(self, index: int) -> Tensor:
        sizing, _ = self._split_sizing()
        return sizing.join([self.decode(index)], None)[0]

    def _split_sizing(self) -> tuple[Pipeline, Pipeline]:
        """Split behind the steps that give every image one size, where these are the same at each reading."""
        if isinstance(self.transform, Pipeline):
            sizing, rest = self.transform.split_at_size()
            if not any(step.n_draws or isinstance(step, PerImage) for step in sizing.steps):
                return sizing, rest
        return Pipeline(), Pipeline()

    def _find_first(self) -> int:
        """Find the first image that can be decoded; damaged ones are left to ``data.on_bad_sample``."""
        n_tries, last = min(_N_TRIES, len(self)), None
        for index in range(n_tries):
            try:
                self.decode(index)
            except DataError as error:
                last = error
            else:
                return index
        raise DataError(f"none of the first {n_tries:,} images can be read; the last one: {last}") from last


def _find_split_folder(folder: Path, split: str) -> Path | None:
    """Return the folder of a split; None where there is no folder for training."""
    train = folder / "train"
    if not train.is_dir():
        return None
    val = next((folder / name for name in _VAL_FOLDERS if (folder / name).is_dir()), None)
    if val is None:
        raise DataError(
            f"{folder} has train/ and no {', '.join(_VAL_FOLDERS)}/; add one, or give {train} as the path to split it"
        )
    return train if split == "train" else val


def _list_images(folder: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    classes = list_folders(folder)
    if not classes:
        raise DataError(f"{folder} holds no class folders; put images into {folder}/<class>/")
    files: list[str] = []
    targets: list[int] = []
    for target, name in enumerate(classes):
        walked = ((place, file) for place, _, names in os.walk(folder / name) for file in names)
        found = sorted(os.path.join(place, file) for place, file in walked if is_image(file))
        if not found:
            raise DataError(f"{folder / name} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))}); remove or fill it")
        files += found
        targets += [target] * len(found)
    return np.array(files), np.array(targets, dtype=np.int64), classes


def _match_classes(train: Path, val: Path, targets: np.ndarray, classes: list[str]) -> tuple[np.ndarray, list[str]]:
    """Number the validation classes as training does, which may have more of them."""
    known = list_folders(train)
    unknown = sorted(set(classes) - set(known))
    if unknown:
        raise DataError(f"{val} has classes that {train} lacks: {', '.join(unknown[:5])}; both need the same names")
    return np.array([known.index(name) for name in classes], dtype=np.int64)[targets], known


def _describe_size(image_CHW: Tensor) -> str:
    return f"{image_CHW.shape[2]} × {image_CHW.shape[1]} pixels"
