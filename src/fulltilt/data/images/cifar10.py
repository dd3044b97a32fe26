"""CIFAR-10: 50,000 training and 10,000 validation images of 32 × 32 in ten classes."""

import hashlib

import torch

from fulltilt.data.images import cifar10_formats as formats
from fulltilt.data.images import decoded_cache
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.paths import resolve_path
from fulltilt.data.splits import Split, check_split, spread_rows
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
    """Read CIFAR-10 into memory, (3, 32, 32), from whichever form lies at ``path``.

    Args:
        split: ``train``, or ``val`` for the test images.
        path: The folder (or tar of class folders); ``root`` is used without it. File names tell the form.
        limit: Keep only so many images, evenly spread over the file order.
        cache: Keep decoded images under ``~/.cache/fulltilt``, so that the next process need not decode them.

    Raises:
        DataError: Nothing is found there, or a file is damaged; names it.
    """
    check_split(split)
    source = formats.find_source(resolve_path(path or root, base_dir))
    images, targets = _read(source, split, cache=cache)
    if limit is not None:
        if not 1 <= limit <= len(images):
            remedy = (
                "use fewer" if split == "train" else f"write the same call with limit={len(images)} at data.val_dataset"
            )
            remedy = "use 1 or more" if limit < 1 else remedy
            raise DataError(f"limit {limit} is not between 1 and the {len(images)} images of split {split}; {remedy}")
        rows = spread_rows(len(images), limit)
        images, targets = images[rows], targets[rows]
    return MemoryImages(
        "cifar10",
        torch.from_numpy(images),
        torch.from_numpy(targets),
        classes=formats.CLASSES,
        transform=resolve_transform(transform, mean=MEAN, std=STD, base_dir=base_dir),
    )


def _read(source: formats.Source, split: str, *, cache: bool) -> formats.Arrays:
    if source.form in ("pickles", "binary"):
        return formats.read_batches(source, split)
    if cache and (found := decoded_cache.read_cached(_compute_fingerprint(source, split))) is not None:
        return found
    if source.form == "tar":
        decoded = formats.read_tar(source.path)  # both splits in one pass
    else:
        decoded = {split: formats.read_folders(source.path, split)}
    for name, arrays in decoded.items() if cache else ():
        decoded_cache.write_cached(_compute_fingerprint(source, name), *arrays)
    return decoded[split]


def _compute_fingerprint(source: formats.Source, split: str) -> str:
    parts = ("cifar10", split, *formats.list_state(source, split))
    return hashlib.sha256("".join(f"{part}\n" for part in parts).encode()).hexdigest()[:24]
