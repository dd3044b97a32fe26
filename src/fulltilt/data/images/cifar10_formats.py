"""Find and read CIFAR-10 stored as Python pickles, binary records, class folders or a tar of class folders."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from fulltilt.data.images.image_sets import decode_image, import_pillow, is_image, list_folders
from fulltilt.errors import DataError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
Arrays = tuple[np.ndarray, np.ndarray]  # (N, 3, 32, 32) uint8, (N,) int64
_FILES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "val": ("test_batch",)}
_FOLDERS = {"train": ("train",), "val": ("test", "val", "valid", "validation")}


class Source(NamedTuple):
    form: Literal["pickles", "binary", "folders", "tar"]
    path: Path


def find_source(path: Path) -> Source:
    """Find CIFAR-10 at ``path``, in it, or one folder below it."""
    if path.is_file():
        if tarfile.is_tarfile(path):
            return Source("tar", path)
        raise DataError(f"{path} is a file and no tar; give the folder that holds the CIFAR-10 files")
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give the folder that holds the CIFAR-10 files")
    for folder in (path, *(path / name for name in list_folders(path))):
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
    """Yield (path, size, mtime) of the tar, or of a split's image files in class folders, for the fingerprint."""
    files = [source.path] if source.form == "tar" else [entry for entry, _ in _list_files(source.path, split)]
    for file in files:
        info = file.stat()
        yield os.fspath(file), info.st_size, info.st_mtime_ns


def read_batches(source: Source, split: str) -> Arrays:
    """Read the files of cifar-10-python (pickles) or cifar-10-binary (records of a class byte and 3,072 pixels)."""
    if source.form == "pickles":
        parts = [_read_pickle(source.path / name) for name in _FILES[split]]
    else:
        parts = [_read_records(source.path / f"{name}.bin") for name in _FILES[split]]
    return np.concatenate([images for images, _ in parts]), np.concatenate([targets for _, targets in parts])


def read_folders(root: Path, split: str) -> Arrays:
    """Read a split's images from ``train/<class>/`` or ``test/<class>/`` (or val, valid, validation)."""
    import_pillow()
    files = list(_list_files(root, split))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        images = list(pool.map(lambda item: _decode(item[0].path, item[0].path), files))
    return np.stack(images), np.array([target for _, target in files], dtype=np.int64)


def read_tar(path: Path) -> dict[str, Arrays]:
    """Read both splits from class folders inside a tar in one pass, without extracting it."""
    import_pillow()
    found: dict[str, list[tuple[int, str, np.ndarray]]] = {"train": [], "val": []}
    try:
        with tarfile.open(path, "r|*") as members:
            for member in members:
                place = _place_member(member)
                stream = members.extractfile(member) if place else None
                if place and stream is not None:
                    split, target = place
                    pixels = _decode(io.BytesIO(stream.read()), f"{path}:{member.name}")
                    found[split].append((target, member.name, pixels))
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a tar ({error}); fetch it again") from error
    arrays = {}
    for split, items in found.items():
        if not items:
            raise DataError(f"{path} holds no {split} images in class folders; expected train/airplane/0000.jpg …")
        items.sort(key=lambda item: item[:2])
        targets = np.array([target for target, *_ in items], np.int64)
        arrays[split] = np.stack([pixels for *_, pixels in items]), targets
    return arrays


def _read_pickle(path: Path) -> Arrays:
    content = _open(path, lambda stream: _RestrictedUnpickler(stream, encoding="bytes").load())
    rows = content.get(b"data", content.get("data")) if isinstance(content, dict) else None
    labels = content.get(b"labels", content.get("labels")) if isinstance(content, dict) else None
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _PIXELS:
        raise DataError(f"{path} holds no (N, {_PIXELS}) uint8 array named data; it is not a CIFAR-10 batch")
    targets = np.asarray(labels)
    if targets.shape != (len(rows),) or targets.dtype.kind not in "iu":
        raise DataError(f"{path} holds {len(rows)} images and labels of shape {targets.shape}; no CIFAR-10 batch")
    return rows.reshape(-1, 3, _SIDE, _SIDE), _check_targets(path, targets)


def _read_records(path: Path) -> Arrays:
    data = _open(path, lambda stream: stream.read())
    if not data or len(data) % (_PIXELS + 1):
        raise DataError(f"{path} has {len(data)} bytes, no whole number of {_PIXELS + 1}-byte records; fetch it again")
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, _PIXELS + 1)
    return records[:, 1:].reshape(-1, 3, _SIDE, _SIDE), _check_targets(path, records[:, 0])


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


class _RestrictedUnpickler(pickle.Unpickler):
    """Builds arrays and plain containers; refuses every other global in a file before it is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            return np.empty(0).__reduce__()[0]
        if name == "_frombuffer" and module in ("numpy.core.numeric", "numpy._core.numeric"):
            return np.empty(0).__reduce_ex__(5)[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        if (module, name) == ("_codecs", "encode"):
            return _encode_latin1
        raise pickle.UnpicklingError(
            f"it asks for {module}.{name}; only numpy arrays and plain containers are admitted"
        )


def _encode_latin1(text: str, encoding: str = "latin1") -> bytes:
    """Build bytes as Python 3 writes them into an old pickle protocol."""
    if encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"it asks for the codec {encoding!r}; only latin1 is admitted")
    return text.encode("latin-1")


def _check_targets(path: Path, targets: np.ndarray) -> np.ndarray:
    targets = targets.astype(np.int64)
    if targets.size and not 0 <= targets.min() <= targets.max() < len(CLASSES):
        raise DataError(f"{path} has classes from {targets.min()} to {targets.max()}; CIFAR-10 has 0 to 9")
    return targets


def _list_files(root: Path, split: str) -> Iterator[tuple[os.DirEntry, int]]:
    """Yield the image files of a split with their classes, in the order of classes and names."""
    names = _FOLDERS[split]
    folder = next((root / name for name in names if (root / name).is_dir()), None)
    if folder is None:
        raise DataError(f"{root} has no folder {' or '.join(names)}; put {split} images into {names[0]}/<class>/*.jpg")
    for target, name in enumerate(CLASSES):
        there = os.scandir(folder / name) if (folder / name).is_dir() else ()
        files = sorted((entry for entry in there if is_image(entry.name)), key=lambda entry: entry.name)
        if not files:
            raise DataError(f"{folder / name} holds no images; CIFAR-10 has the classes {', '.join(CLASSES)}")
        yield from ((entry, target) for entry in files)


def _place_member(member: tarfile.TarInfo) -> tuple[str, int] | None:
    """Return (split, class) of a tar's member by its last three path parts, None for anything else."""
    parts = member.name.split("/")
    if not member.isfile() or len(parts) < 3 or not is_image(parts[-1]):
        return None
    split = next((split for split, names in _FOLDERS.items() if parts[-3] in names), None)
    return (split, CLASSES.index(parts[-2])) if split and parts[-2] in CLASSES else None


def _decode(source: str | io.BytesIO, name: str) -> np.ndarray:
    pixels = decode_image(source, name=name).numpy()
    if pixels.shape != (3, _SIDE, _SIDE):
        raise DataError(f"{name} is {pixels.shape[2]} × {pixels.shape[1]} pixels; CIFAR-10 images are 32 × 32")
    return pixels
