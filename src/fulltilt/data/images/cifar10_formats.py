"""The forms in which CIFAR-10 lies on disks: Python pickles, binary records, class folders of images, a tar of them."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

from fulltilt.data.images.image_sets import IMAGE_SUFFIXES, decode_image, import_pillow
from fulltilt.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE

Form = Literal["pickles", "binary", "folders", "tar"]
Arrays = tuple[np.ndarray, np.ndarray]  # (N, 3, 32, 32) uint8, (N,) int64
_FILES = {
    "train": tuple(f"data_batch_{i}" for i in range(1, 6)),
    "val": ("test_batch",),
}
_VAL_FOLDERS = ("test", "val", "valid", "validation")


@dataclasses.dataclass(frozen=True)
class Source:
    form: Form
    path: Path


def find_source(path: Path) -> Source:
    """What lies at ``path``, in it, or one folder below it.

    Raises:
        DataError: Nothing of CIFAR-10 is there.
    """
    if path.is_file():
        if tarfile.is_tarfile(path):
            return Source("tar", path)
        raise DataError(f"{path} is a file and no tar; give the folder that holds the CIFAR-10 files")
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give the folder that holds the CIFAR-10 files")
    below = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    for folder in (path, *below):
        if (folder / "test_batch").is_file():
            return Source("pickles", folder)
        if (folder / "test_batch.bin").is_file():
            return Source("binary", folder)
        if any((folder / "train" / name).is_dir() for name in CLASSES):
            return Source("folders", folder)
    tars = sorted(file for file in path.iterdir() if "cifar" in file.name.lower() and ".tar" in file.name)
    remedy = f"; {tars[0].name} is there: give its own path when it holds class folders, or extract it" if tars else ""
    raise DataError(
        f"no CIFAR-10 in {path}: looked there and one folder below for data_batch_1 … test_batch, for "
        f"data_batch_1.bin … test_batch.bin, and for train/<class>/*.jpg{remedy}"
    )


def list_state(source: Source, split: str) -> Iterator[tuple[str, int, int]]:
    """(name, size, time) of every file that one split is made of: what its fingerprint is made of."""
    if source.form == "tar":
        info = source.path.stat()
        yield str(source.path), info.st_size, info.st_mtime_ns
        return
    for target in range(len(CLASSES)):
        for file in _list_class(_find_split_folder(source.path, split), target):
            info = file.stat()
            yield str(file.path), info.st_size, info.st_mtime_ns


def read_pickles(folder: Path, split: str) -> Arrays:
    """The files of cifar-10-python: five of 10,000 rows and one.

    Raises:
        DataError: A file is missing, damaged, or holds anything but arrays and plain containers.
    """
    return _join([_read_pickle(folder / name) for name in _FILES[split]])


def read_binary(folder: Path, split: str) -> Arrays:
    """The files of cifar-10-binary: records of one class byte and 3,072 pixels.

    Raises:
        DataError: A file is missing or is not made of whole records.
    """
    return _join([_read_records(folder / f"{name}.bin") for name in _FILES[split]])


def read_folders(root: Path, split: str) -> Arrays:
    """``train/<class>/*.jpg`` and ``test/<class>/*.jpg``.

    Raises:
        DataError: A folder is missing or empty; an image is damaged or not 32 × 32.
    """
    import_pillow()
    folder = _find_split_folder(root, split)
    files = [(entry.path, target) for target in range(len(CLASSES)) for entry in _list_class(folder, target)]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        images = list(pool.map(lambda item: _decode(item[0], item[0]), files))
    return np.stack(images), np.array([target for _, target in files], dtype=np.int64)


def read_tar(path: Path) -> dict[str, Arrays]:
    """Class folders inside a tar, both splits in one pass; nothing is extracted.

    Raises:
        DataError: The tar is damaged or holds no class folders.
    """
    import_pillow()
    found: dict[str, list[tuple[str, int, np.ndarray]]] = {"train": [], "val": []}
    try:
        with tarfile.open(path, "r|*") as members:
            for member in members:
                place = _place_member(member)
                stream = members.extractfile(member) if place else None
                if place and stream is not None:
                    split, target = place
                    pixels = _decode(io.BytesIO(stream.read()), f"{path}:{member.name}")
                    found[split].append((member.name, target, pixels))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar ({error}); fetch it again") from error
    for split, items in found.items():
        if not items:
            raise DataError(f"{path} holds no {split} images in class folders; expected train/airplane/0000.jpg …")
        items.sort(key=lambda item: (item[1], item[0]))
    return {
        split: (np.stack([pixels for *_, pixels in items]), np.array([target for _, target, _ in items], np.int64))
        for split, items in found.items()
    }


def _read_pickle(path: Path) -> Arrays:
    content = _open(path, _load_restricted)
    rows = content.get(b"data", content.get("data")) if isinstance(content, dict) else None
    labels = content.get(b"labels", content.get("labels")) if isinstance(content, dict) else None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _PIXELS:
        raise DataError(f"{path} holds no (N, {_PIXELS}) uint8 array named data; it is not a CIFAR-10 batch")
    targets = np.asarray(labels)
    if targets.shape != (len(rows),) or targets.dtype.kind not in "iu":
        raise DataError(
            f"{path} holds {len(rows)} images and labels of shape {targets.shape}; it is not a CIFAR-10 batch"
        )
    return rows.reshape(-1, 3, _SIDE, _SIDE), _check_targets(path, targets.astype(np.int64))


def _read_records(path: Path) -> Arrays:
    data = _open(path, lambda stream: stream.read())
    if not data or len(data) % (_PIXELS + 1):
        raise DataError(f"{path} has {len(data)} bytes, no whole number of {_PIXELS + 1}-byte records; fetch it again")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, _PIXELS + 1)
    images = records[:, 1:].reshape(-1, 3, _SIDE, _SIDE)
    return images, _check_targets(path, records[:, 0].astype(np.int64))


def _open(path: Path, read: Callable[[BinaryIO], Any]) -> Any:
    try:
        with path.open("rb") as stream:
            return read(stream)
    except FileNotFoundError:
        raise DataError(f"{path} is missing; a whole CIFAR-10 has data_batch_1 to 5 and test_batch") from None
    except _PICKLE_ERRORS as error:
        raise DataError(f"{path} cannot be read ({type(error).__name__}: {error}); fetch it again") from error


_PICKLE_ERRORS = (
    pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ImportError,
    OverflowError, MemoryError, struct.error,
)  # fmt: skip
"""What a damaged pickle is known to raise."""


def _load_restricted(stream: BinaryIO) -> Any:
    return _RestrictedUnpickler(stream, encoding="bytes").load()


class _RestrictedUnpickler(pickle.Unpickler):
    """Builds arrays and plain containers; every other global in a file is refused before it is touched."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        if name == "_frombuffer" and module in ("numpy.core.numeric", "numpy._core.numeric"):
            return np.empty(0).__reduce_ex__(5)[0]
        if (module, name) == ("numpy", "ndarray"):
            return np.ndarray
        if (module, name) == ("numpy", "dtype"):
            return np.dtype
        if (module, name) == ("_codecs", "encode"):
            return _encode_latin1
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}; only numpy arrays and plain containers are admitted"
        )


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    """How Python 3 writes bytes into an old pickle protocol."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it asks for the codec {encoding!r}; only latin1 is admitted")
    return text.encode("latin-1")


def _check_targets(path: Path, targets: np.ndarray) -> np.ndarray:
    if targets.size and not 0 <= targets.min() <= targets.max() < len(CLASSES):
        raise DataError(f"{path} has classes from {targets.min()} to {targets.max()}; CIFAR-10 has 0 to 9")
    return targets


def _join(parts: list[Arrays]) -> Arrays:
    return np.concatenate([images for images, _ in parts]), np.concatenate([targets for _, targets in parts])


def _find_split_folder(root: Path, split: str) -> Path:
    names = ("train",) if split == "train" else _VAL_FOLDERS
    for name in names:
        if (root / name).is_dir():
            return root / name
    raise DataError(f"{root} has no folder {' or '.join(names)}; put {split} images into {names[0]}/<class>/*.jpg")


def _list_class(folder: Path, target: int) -> list[os.DirEntry]:
    try:
        with os.scandir(folder / CLASSES[target]) as entries:
            files = [entry for entry in entries if os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES]
    except (FileNotFoundError, NotADirectoryError):
        files = []
    if not files:
        raise DataError(f"{folder / CLASSES[target]} holds no images; CIFAR-10 has the classes {', '.join(CLASSES)}")
    return sorted(files, key=lambda entry: entry.name)


def _place_member(member: tarfile.TarInfo) -> tuple[str, int] | None:
    """(split, class) of a tar's member by its last three path parts, None for anything else."""
    parts = member.name.split("/")
    if not member.isfile() or len(parts) < 3 or os.path.splitext(parts[-1])[1].lower() not in IMAGE_SUFFIXES:
        return None
    split = {"train": "train"}.get(parts[-3], "val" if parts[-3] in _VAL_FOLDERS else None)
    return (split, CLASSES.index(parts[-2])) if split and parts[-2] in CLASSES else None


def _decode(source: str | io.BytesIO, name: str) -> np.ndarray:
    pixels = decode_image(source, name=name).numpy()
    if pixels.shape != (3, _SIDE, _SIDE):
        raise DataError(f"{name} is {pixels.shape[2]} × {pixels.shape[1]} pixels; CIFAR-10 images are 32 × 32")
    return pixels
