"""CIFAR-10: 50,000 training and 10,000 validation images of 32 × 32 in ten classes."""

from __future__ import annotations

import numpy as np
import torch

from fulltilt.data.images import cifar10_formats as formats
from fulltilt.data.images import decoded_cache
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, check_split
from fulltilt.data.transforms.pipeline import Transform, resolve_transform
from fulltilt.errors import DataError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # per channel over the 50,000 training images


def cifar10(
    split: Split = "train",
    transform: Transform = None,
    path: str | None = None,
    root: str = "data",
    limit: int | None = None,
    cache: bool = True,
    base_dir: str | None = None,
) -> MemoryImages:
    """CIFAR-10 in memory, (3, 32, 32), from whichever form lies at ``path``.

    Args:
        split: ``train`` or ``val`` (the test images).
        transform: Text of a pipeline, or a callable on one image.
        path: The folder (or tar of class folders); stands in for ``root``.
        root: The folder when no ``path`` is given. What it holds is told by its file names.
        limit: Keep only so many images, evenly spread over the file order.
        cache: Keep decoded images under ``~/.cache/fulltilt``, so that the next process need not decode them.
        base_dir: Where relative paths start; the working directory when None.

    Raises:
        DataError: Nothing is found there, or a file is damaged; names it.
    """
    check_split(split)
    source = formats.find_source(resolve_path(path or root, base_dir))
    images, targets = _read(source, split, cache=cache)
    if limit is not None:
        rows = _spread(len(images), limit)
        images, targets = images[rows], targets[rows]
    return MemoryImages(
        "cifar10",
        torch.from_numpy(images),
        torch.from_numpy(targets),
        classes=formats.CLASSES,
        transform=resolve_transform(transform, mean=MEAN, std=STD, base_dir=base_dir),
    )


def _read(source: formats.Source, split: str, *, cache: bool) -> formats.Arrays:
    if source.form == "pickles":
        return formats.read_pickles(source.path, split)
    if source.form == "binary":
        return formats.read_binary(source.path, split)
    if not cache:
        return _decode(source, split)[split]
    found = decoded_cache.read_cached(_fingerprint(source, split))
    if found is not None:
        return found
    decoded = _decode(source, split)
    for name, (images, targets) in decoded.items():
        decoded_cache.write_cached(_fingerprint(source, name), images, targets)
    return decoded[split]


def _decode(source: formats.Source, split: str) -> dict[str, formats.Arrays]:
    if source.form == "tar":
        return formats.read_tar(source.path)
    return {split: formats.read_folders(source.path, split)}


def _fingerprint(source: formats.Source, split: str) -> str:
    return decoded_cache.compute_source_fingerprint(("cifar10", split, *formats.list_state(source, split)))


def _spread(n_rows: int, limit: int) -> np.ndarray:
    if not 1 <= limit <= n_rows:
        raise DataError(f"limit {limit} is not between 1 and the {n_rows} images there")
    return np.linspace(0, n_rows, limit, endpoint=False).astype(np.int64)
