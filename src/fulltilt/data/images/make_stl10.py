"""Write CIFAR-10 or a folder of class folders in STL-10's binary format."""

import dataclasses
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fulltilt.data.images import cifar10_formats
from fulltilt.data.images.cifar10 import cifar10
from fulltilt.data.images.image_folder import image_folder
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.images.stl10 import MARK, MAX_CLASSES, UNDER_WAY
from fulltilt.data.new_file import Counter, Progress, check_name, check_room, new_file
from fulltilt.data.splits import spread_rows
from fulltilt.data.transforms.steps import resize_images
from fulltilt.errors import DataError

REMEDY = "write fewer images (--limit) or smaller ones (--size)"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MadeStl10:
    """Holds the image counts, edge length and class names of a written STL-10 folder."""

    n_train: int
    n_test: int
    n_unlabeled: int
    side: int
    classes: tuple[str, ...]


def make_stl10(
    source: str | Path,
    target: str | Path,
    *,
    size: int = 96,
    n_labelled: int | None = None,
    limit: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> MadeStl10:
    """Write ``source`` into the folder ``target``: train and test images and, with ``n_labelled``, unlabeled ones.

    Args:
        source: CIFAR-10 in any of its forms, or a folder that ``image_folder`` reads.
        size: Pixels along an edge: the shorter side is resized to it, the middle is cut out.
        n_labelled: Training images that keep their label, evenly over the classes; the others go to
            ``unlabeled_X.bin``. With None all keep it, and there is no such file.
        limit: Training images at most, and a fifth of that test images, evenly spread.
        progress: Called with images written and their number.

    Raises:
        DataError: Nothing to read there, a damaged image (names it), files there already, or a number out of range.
        StorageError: The disk has no room; no file is left half written.
    """
    if size < 1:
        raise DataError(f"size {size} must be 1 or more")
    train, test = _open_source(Path(source))
    classes = tuple(train.classes)
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{source} has {len(classes)} classes and the format has room for {MAX_CLASSES}")
    train_rows = _spread(len(train), limit)
    test_rows = _spread(len(test), None if limit is None else max(1, limit // 5))
    labelled, unlabelled = _part_labelled(np.asarray(train.targets)[train_rows], n_labelled)
    parts = {
        "train": (train, train_rows[labelled]),
        "test": (test, test_rows),
        "unlabeled": (train, train_rows[unlabelled]),
    }
    folder = Path(target)
    for name in ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "unlabeled_X.bin", "class_names.txt"):
        check_name(folder / name, force=force)
    n_images = sum(len(rows) for _, rows in parts.values())
    check_room(folder / "train_X.bin", n_images * (3 * size * size + 1), remedy=REMEDY)
    _write_bytes(folder / MARK, [UNDER_WAY.encode()])  # images and labels are replaced one after the other
    (folder / "unlabeled_X.bin").unlink(missing_ok=True)  # of what is being replaced; there may be none now
    report = Counter(progress, n_images)
    for name, (dataset, rows) in parts.items():
        if len(rows):
            _write_images(folder / f"{name}_X.bin", dataset, rows, size, report)
        if len(rows) and name != "unlabeled":
            labels = (np.asarray(dataset.targets)[rows] + 1).astype(np.uint8)
            _write_bytes(folder / f"{name}_y.bin", [labels.tobytes()])
    _write_bytes(folder / "class_names.txt", ["".join(f"{'_'.join(name.split())}\n" for name in classes).encode()])
    _write_bytes(folder / MARK, [secrets.token_hex(8).encode()])
    return MadeStl10(
        n_train=len(labelled), n_test=len(test_rows), n_unlabeled=len(unlabelled), side=size, classes=classes
    )


def _open_source(path: Path) -> tuple[Any, Any]:
    """Open training and test images; class folders of any name and size are read by ``image_folder``."""
    try:
        form = cifar10_formats.find_source(path).form
    except DataError:
        form = "folders"
    read = image_folder if form == "folders" else cifar10
    return read("train", path=str(path)), read("val", path=str(path))


def _spread(n_rows: int, limit: int | None) -> np.ndarray:
    if limit is not None and limit < 1:
        raise DataError(f"limit {limit} must be 1 or more")
    if limit is None or limit >= n_rows:
        return np.arange(n_rows)
    return spread_rows(n_rows, limit)


def _part_labelled(targets: np.ndarray, n_labelled: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Choose which images keep their label, every class in the same share, and which do not."""
    if n_labelled is None:
        return np.arange(len(targets)), np.arange(0)
    if not 1 <= n_labelled < len(targets):
        raise DataError(f"labelled {n_labelled} is not between 1 and the {len(targets)} training images")
    by_class = np.argsort(targets, kind="stable")
    keep = np.zeros(len(targets), dtype=bool)
    keep[by_class[spread_rows(len(targets), n_labelled)]] = True
    return np.flatnonzero(keep), np.flatnonzero(~keep)


def _write_images(path: Path, dataset: Any, rows: np.ndarray, size: int, report: Counter) -> None:
    def encode() -> Iterator[bytes]:
        for row in rows.tolist():
            image_CHW = dataset.images[row] if isinstance(dataset, MemoryImages) else dataset.decode(row)
            yield np.ascontiguousarray(
                _resize_and_crop(image_CHW, size).numpy().swapaxes(1, 2)
            ).tobytes()  # column by column
            report.add()

    _write_bytes(path, encode())


def _write_bytes(path: Path, chunks: Iterable[bytes]) -> None:
    with new_file(path, remedy=REMEDY) as temporary, temporary.open("wb") as stream:
        for chunk in chunks:
            stream.write(chunk)


def _resize_and_crop(image_CHW: Tensor, size: int) -> Tensor:
    scale = size / min(image_CHW.shape[1:])
    height, width = (max(size, round(edge * scale)) for edge in image_CHW.shape[1:])
    resized_CHW = resize_images(image_CHW[None], height, width)[0]
    top, left = (height - size) // 2, (width - size) // 2
    return resized_CHW[:, top : top + size, left : left + size]
