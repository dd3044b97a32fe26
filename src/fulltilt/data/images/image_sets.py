"""Hold images in memory, and decode images from files."""

import copy
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fulltilt.data.batched import BatchedDataset, Indices
from fulltilt.data.tables.held_rows import gather_rows
from fulltilt.data.transforms.pipeline import Raw, apply_transform, read_sample_shape
from fulltilt.errors import DataError

IMAGE_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"))


def is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def list_folders(path: Path) -> list[str]:
    """List the names of the folders in ``path``, in order, without the hidden ones."""
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


class MemoryImages(BatchedDataset):
    """Images (N, C, H, W) uint8 and targets (N,) int64 in host memory or on a device.

    Attributes:
        transform: On a batch (Pipeline) or on one image; without one a sample is float32 in [0, 1].
        placement: ``ram`` or ``device`` behind ``hold``.
    """

    yields_pixels = is_held = True
    placement = "stream"
    _is_pinned = False

    def __init__(
        self, name: str, images: Tensor, targets: Tensor, *, classes: Sequence[str], transform: Callable | Raw | None
    ):
        self.name, self.images, self.targets, self.transform = name, images, targets, transform
        self.classes, self.n_classes = tuple(classes), len(classes)
        self.sample_shape = read_sample_shape(lambda: self[0][0])

    def __len__(self) -> int:
        return len(self.targets)

    def get_batch(self, indices: Indices, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Read a batch: (B, C, H, W) float32, or uint8 where the transform comes later, and (B,) int64."""
        rows = np.asarray(indices) % len(self)  # -1 is the last one
        if isinstance(self.transform, Raw) or self.placement == "device":
            images, targets = self.gather(rows)
        else:
            images, targets = self.images.index_select(0, torch.from_numpy(rows)), self.targets[rows]
        return apply_transform(self.transform, images, generator), targets

    def gather(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Gather a batch of raw images and their targets."""
        images, targets = (gather_rows(table, rows, is_pinned=self._is_pinned) for table in (self.images, self.targets))
        return images, targets

    @property
    def held_bytes(self) -> int:
        return sum(table.numel() * table.element_size() for table in (self.images, self.targets))

    def hold(self, device: torch.device, *, is_pinned: bool = False) -> "MemoryImages":
        """Return the same samples on ``device``; ``self`` stays unchanged."""
        other = copy.copy(self)
        other.images, other.targets = self.images.to(device), self.targets.to(device)
        other.placement = "ram" if device.type == "cpu" else "device"
        other._is_pinned = is_pinned
        return other


def decode_image(source: str | Path | IO[bytes], *, mode: str = "RGB", name: str | None = None) -> Tensor:
    """Decode one image file to (C, H, W) uint8 in ``mode``: ``RGB`` or ``L`` (one channel)."""
    image_module = import_pillow()
    try:
        with image_module.open(source) as image:
            kind = image.mode
            pixels = _read_pixels(image, mode)
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, image_module.DecompressionBombError) as error:
        raise DataError(f"{name or source} cannot be decoded ({error}); remove the file or replace it") from error
    if pixels is None:
        raise DataError(
            f"{name or source} holds numbers of Pillow's mode {kind}, whose black and white are not known; convert it "
            "to 8 or 16 bits a channel"
        )
    pixels_HWC = pixels[..., None] if pixels.ndim == 2 else pixels
    return torch.from_numpy(pixels_HWC.transpose(2, 0, 1).copy())


def _read_pixels(image: Any, mode: str) -> np.ndarray | None:
    """Return (H, W, C) or (H, W) uint8; None where the image does not say what its largest value is.

    Pillow's own conversion clips 16 bits at 255, which makes all but the darkest pixels white.
    """
    is_of_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG")
    if not is_of_16_bits:
        return None if image.mode in ("I", "F") else np.asarray(image.convert(mode))
    values = np.asarray(image).astype(np.uint32)
    gray = ((values + 128) // 257).astype(np.uint8)  # 65,535 is 255 × 257
    return gray if mode == "L" else np.repeat(gray[..., None], len(mode), axis=-1)


def import_pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("image files need Pillow, which is not installed; run: pip install pillow") from None
    return Image
