"""Read handwritten digits: 1,797 images of 8 × 8 that come with scikit-learn."""

import gzip
import importlib.util
from pathlib import Path

import numpy as np
import torch

from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.data.splits import Split, split_stratified
from fulltilt.data.transforms.pipeline import Transform, resolve_transform
from fulltilt.errors import DataError

MEAN, STD = (0.3053,), (0.3759,)  # over all pixels of all images in [0, 1]
_VAL_FRACTION = 0.2
_SPLIT_SEED = 0
_INK_LEVELS = 16  # a pixel of the source counts inked cells of a 4 × 4 block


def digits(split: Split = "train", transform: Transform = None, path: str | None = None) -> MemoryImages:
    """Read 1,438 training or 359 validation images, (1, 8, 8); the split is stratified by class.

    ``path`` names another ``digits.csv.gz`` than scikit-learn's.

    Raises:
        DataError: scikit-learn is not installed, or the file cannot be read.
    """
    pixels, targets = _read_digits(Path(path) if path else _find_file())
    rows = split_stratified(targets, split, val_fraction=_VAL_FRACTION, seed=_SPLIT_SEED, what="digits")
    images = torch.from_numpy(np.rint(pixels[rows] * (255 / _INK_LEVELS)).astype(np.uint8)).reshape(-1, 1, 8, 8)
    return MemoryImages(
        "digits",
        images,
        torch.from_numpy(targets[rows]),
        classes=[str(digit) for digit in range(10)],
        transform=resolve_transform(transform, mean=MEAN, std=STD),
    )


REMEDY = "leave the path out to read scikit-learn's own digits.csv.gz, or reinstall scikit-learn"


def _find_file() -> Path:
    # Importing scikit-learn would take over a second, in every trial.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("digits come with scikit-learn, which is not installed; run: pip install scikit-learn")
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"


def _read_digits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with gzip.open(path, "rt") as lines:
            table = np.array([line.split(",") for line in lines], dtype=np.float32)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} cannot be read as digits ({error}); {REMEDY}") from error
    if table.ndim != 2 or table.shape[1] != 65:
        raise DataError(f"{path} has shape {table.shape}, not 64 pixels and a class per line; {REMEDY}")
    return table[:, :64], table[:, 64].astype(np.int64)
