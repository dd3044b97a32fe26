"""STL-10's binary format: uint8 images mapped from the disk, with labels and without.

``train_X.bin``, ``test_X.bin`` and ``unlabeled_X.bin`` hold images one after the other, each as three planes (red,
green, blue) column by column. ``train_y.bin`` and ``test_y.bin`` hold one byte an image: 1 to 10, the lines of
``class_names.txt``. STL-10 has 96 × 96 pixels; files of ``make-stl10`` may have others, which their length tells.

Legend of shape suffixes: B batch, C channels, W columns of pixels, H rows of pixels.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, check_split, spread_rows
from fulltilt.data.transforms.batch_transform import take_raw
from fulltilt.data.transforms.pipeline import Transform, apply_transform, read_sample_shape, resolve_transform
from fulltilt.errors import DataError

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
"""Where there is no class_names.txt."""
FOLDER = "stl10_binary"  # what the archive of the data set unpacks to
MAX_CLASSES = 255  # a label is a byte, from 1
N_FOR_MEAN = 1000
MARK = "made.txt"  # written by make-stl10 before its first file and after its last one
UNDER_WAY = "being written"

Part = Literal["train", "unlabeled", "train+unlabeled"]


def stl10(
    split: Split = "train",
    transform: Transform = None,
    path: str | None = None,
    root: str = "data",
    part: Part = "train",
    base_dir: str | None = None,
) -> "Stl10":
    """Map STL-10, or other images in its format, (3, 96, 96); only the images of a batch are in memory.

    Args:
        split: ``train``, or ``val`` for the test images.
        transform: ``normalize`` takes mean and deviation of up to 1,000 training images of the file at hand.
        path: The folder, or the one above its ``stl10_binary``; ``root`` is used without it.
        part: Which images to train on; the unlabeled ones have target -1.

    Raises:
        DataError: A file is missing, was cut, or does not go with its labels; names it.
    """
    check_split(split)
    folder = find_folder(resolve_path(path or root, base_dir))
    names = ["test"] if split == "val" else part.split("+")
    made = read_mark(folder)
    words = folder / "class_names.txt"
    classes = tuple(words.read_text(encoding="utf-8").split()) if words.is_file() else CLASSES
    open_table = functools.partial(_open_table, folder, side=read_side(folder), n_classes=len(classes))
    tables = [open_table(name) for name in names]
    mean, std = _compute_mean(open_table("train")) if isinstance(transform, str) else (None, None)
    if made == UNDER_WAY or read_mark(folder) != made:
        raise DataError(
            f"the images in {folder} are being replaced by fulltilt data make-stl10, or that was broken off; wait for "
            "it, or run it again with --force"
        )
    return Stl10(tables, classes, resolve_transform(transform, mean=mean, std=std, base_dir=base_dir))


class Table(NamedTuple):
    """The images of one file, and their targets."""

    images: np.ndarray  # (N, C, W, H), mapped
    targets: np.ndarray  # (N,) int64 from 0, -1 without a label


class Stl10(BatchedDataset):
    """The images of one or several files, one after the other; target -1 marks one without a label."""

    name = "stl10"
    yields_pixels = True

    def __init__(self, tables: Sequence[Table], classes: Sequence[str], transform: Callable | None):
        self._tables, self.transform = tuple(tables), transform
        self._starts = np.cumsum([0, *(len(table.targets) for table in tables)])
        self.targets = torch.from_numpy(np.concatenate([table.targets for table in tables]))
        self.classes, self.n_classes = tuple(classes), len(classes)
        self.sample_shape = read_sample_shape(lambda: self[0][0])

    def __len__(self) -> int:
        return len(self.targets)

    def get_batch(self, indices: Indices, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read a batch: (B, C, H, W) float32, or uint8 where the transform comes later, and (B,) int64."""
        rows = np.asarray(indices, dtype=np.int64) % len(self)  # -1 is the last one
        images_BCWH = self._tables[0].images[rows] if len(self._tables) == 1 else self._gather(rows)
        images_BCHW = torch.from_numpy(np.ascontiguousarray(images_BCWH.swapaxes(2, 3)))
        return apply_transform(self.transform, images_BCHW, generator), self.targets[torch.from_numpy(rows)]

    @property
    def held_bytes(self) -> int:
        return len(self) * (math.prod(self._tables[0].images.shape[1:]) + self.targets.element_size())

    def hold(self, device: torch.device, *, is_pinned: bool = False) -> MemoryImages:
        """Read the samples once and hold them on ``device``."""
        images_NCHW, targets = take_raw(self).get_batch(np.arange(len(self)))
        whole = MemoryImages(self.name, images_NCHW, targets, classes=self.classes, transform=self.transform)
        return whole.hold(device, is_pinned=is_pinned)

    def _gather(self, rows: np.ndarray) -> np.ndarray:
        out = np.empty((len(rows), *self._tables[0].images.shape[1:]), dtype=np.uint8)
        for table, start, end in zip(self._tables, self._starts[:-1], self._starts[1:], strict=True):
            here = (rows >= start) & (rows < end)
            out[here] = table.images[rows[here] - start]
        return out


def find_folder(path: Path) -> Path:
    """Return the folder with the files: ``path``, or ``stl10_binary`` in it."""
    for folder in (path, path / FOLDER):
        if (folder / "train_X.bin").is_file():
            return folder
    raise DataError(
        f"no train_X.bin in {path} nor in {path / FOLDER}; unpack stl10_binary.tar.gz there, or write other images in "
        f"that format: fulltilt data make-stl10 SRC {path} --labelled N"
    )


def read_side(folder: Path) -> int:
    """Compute the pixels along an edge from the length of the training images and the number of their labels."""
    images, labels = folder / "train_X.bin", folder / "train_y.bin"
    n_bytes, n_labels = _read_size(images), _read_size(labels)
    side = math.isqrt(n_bytes // (3 * n_labels)) if n_labels else 0
    if not side or n_bytes != 3 * side * side * n_labels:
        raise DataError(
            f"{images} has {n_bytes:,} bytes and {labels} {n_labels:,} labels: square images of three channels do not "
            f"come out (STL-10 has 138,240,000 and 5,000); one of them is truncated or of other images: unpack both"
        )
    return side


def read_mark(folder: Path) -> str | None:
    """Read which run of make-stl10 wrote the folder, or ``UNDER_WAY``; None where none did."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / MARK).read_text(encoding="utf-8")
    return None


def _open_table(folder: Path, name: str, *, side: int, n_classes: int) -> Table:
    path = folder / f"{name}_X.bin"
    n_bytes, image_bytes = _read_size(path), 3 * side * side
    if not n_bytes or n_bytes % image_bytes:
        raise DataError(
            f"{path} has {n_bytes:,} bytes, which is no whole number of images of 3 × {side} × {side} "
            f"({image_bytes:,} bytes, as in train_X.bin); it is truncated, or of another size: unpack all again"
        )
    shape = (n_bytes // image_bytes, 3, side, side)
    # Copy on write: torch wants memory it may write, and the file stays as it is.
    images = np.memmap(path, dtype=np.uint8, mode="c", shape=shape)
    if name == "unlabeled":
        return Table(images, np.full(len(images), -1, dtype=np.int64))
    labels = folder / f"{name}_y.bin"
    n_labels = _read_size(labels)
    if n_labels != len(images):
        raise DataError(
            f"{path} holds {len(images):,} images and {labels} {n_labels:,} labels; one of them is truncated, unpack "
            "it again"
        )
    targets = np.fromfile(labels, dtype=np.uint8).astype(np.int64)
    if targets.min() < 1 or targets.max() > n_classes:
        raise DataError(
            f"{labels} holds labels from {targets.min()} to {targets.max()}, expected 1 to {n_classes}, the lines of "
            "class_names.txt where there is one; it is damaged, unpack it again"
        )
    return Table(images, targets - 1)


def _read_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        raise DataError(
            f"{path} is not there; unpack stl10_binary.tar.gz whole, or convert images of your own with fulltilt data "
            "make-stl10 (--labelled N writes unlabeled_X.bin; part=train takes the labelled ones alone)"
        ) from None


def _compute_mean(table: Table) -> tuple[list[float], list[float]]:
    """Compute mean and deviation per channel of up to 1,000 images, in [0, 1]."""
    rows = spread_rows(len(table.images), min(N_FOR_MEAN, len(table.images)))
    pixels_CN = table.images[rows].swapaxes(0, 1).reshape(3, -1)
    counts_CV = np.stack([np.bincount(channel, minlength=256) for channel in pixels_CN])
    values_V = np.arange(256) / 255
    mean_C = counts_CV @ values_V / counts_CV.sum(1)
    variance_C = counts_CV @ values_V**2 / counts_CV.sum(1) - mean_C**2
    return mean_C.tolist(), np.sqrt(np.maximum(variance_C, 1e-8)).tolist()
