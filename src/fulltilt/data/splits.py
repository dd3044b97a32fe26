"""Deterministic splits into training and validation rows."""

from typing import Literal

import numpy as np

from fulltilt.errors import DataError

Split = Literal["train", "val"]


def check_split(split: str) -> None:
    if split not in ("train", "val"):
        raise DataError(f"split {split!r} is not known; use train or val")


def split_stratified(targets: np.ndarray, split: str, *, val_fraction: float, seed: int, what: str) -> np.ndarray:
    """Draw the rows of one split in rising order, with the same share (within one row) of every class.

    A ``val_fraction`` of 0 gives all rows to training, 1 all to validation.
    """
    check_split(split)
    if not 0 <= val_fraction <= 1:
        raise DataError(f"val_fraction {val_fraction} is not between 0 and 1")
    n_rows = len(targets)
    shuffled = np.random.default_rng(seed).permutation(n_rows)
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    quota = np.floor(np.arange(n_rows + 1) * val_fraction + 1e-9)
    is_val = quota[1:] > quota[:-1]
    rows = np.sort(by_class[is_val if split == "val" else ~is_val])
    if not len(rows):
        raise DataError(
            f"{what} has {n_rows} samples: val_fraction {val_fraction} leaves none for {split}; change it: 0 "
            "gives all to train, 1 to val"
        )
    return rows


def spread_rows(n_rows: int, n_chosen: int) -> np.ndarray:
    """Choose rows evenly spread over ``n_rows``, in rising order."""
    return np.linspace(0, n_rows, n_chosen, endpoint=False).astype(np.int64)
