"""Replaces unreadable samples by others of the same batch, up to a limit, and reports them.

A batch keeps its size: the next readable sample of the batch takes the place of a bad one. The order of the epoch, and
where a resumed run goes on, stay the same.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fulltilt.data.batched import name_sample
from fulltilt.errors import DataError

_N_NAMED = 5


class BadSamples:
    """Marks the samples that could not be read; more than ``limit`` of them are an error.

    With ``share`` the marks lie in memory that worker processes share.
    """

    def __init__(self, dataset: Any, n_samples: int, limit: int, *, share: bool):
        self._dataset, self.limit = dataset, limit
        # One mark a sample: workers set them without a lock, and setting one twice changes nothing.
        self._marks = torch.zeros(n_samples, dtype=torch.uint8)
        if share:
            self._marks.share_memory_()

    @property
    def indices(self) -> list[int]:
        """Return the numbers of the samples left out so far, read in one copy since other processes go on marking."""
        return np.flatnonzero(self._marks.numpy().copy()).tolist()

    def add(self, indices: Sequence[int], error: BaseException) -> None:
        """Mark samples as bad; once more than ``limit`` are marked, raise DataError with the first five names."""
        for index in indices:
            self._marks[index] = 1
        bad = self.indices
        if len(bad) > self.limit:
            raise DataError(
                f"{len(bad)} samples cannot be read, data.on_bad_sample allows {self.limit}: {self._name(bad)}; the "
                f"last said: {error}"
            ) from error

    def replace_in(self, indices: np.ndarray) -> np.ndarray:
        """Replace each bad sample of a batch by a readable one; DataError where there is none."""
        is_bad = self._marks.numpy()[indices] != 0
        if not is_bad.any():
            return indices
        good = np.flatnonzero(~is_bad)
        if not len(good):
            raise DataError(
                f"no sample of a batch of {len(indices)} can be read: {self._name(self.indices)}; repair the data"
            )
        following = np.searchsorted(good, np.flatnonzero(is_bad)) % len(good)
        replaced = indices.copy()
        replaced[is_bad] = indices[good[following]]
        return replaced

    def describe(self, split: str) -> str | None:
        """Report the bad samples in one line; None while there are none."""
        bad = self.indices
        if not bad:
            return None
        return (
            f"{len(bad)} of {len(self._marks)} {split} samples could not be read, another one of the batch stands in "
            f"for each (data.on_bad_sample allows {self.limit}): {self._name(bad)}"
        )

    def _name(self, indices: Sequence[int]) -> str:
        names = [name_sample(self._dataset, index) for index in indices[:_N_NAMED]]
        return ", ".join(names) + (f", and {len(indices) - _N_NAMED} more" if len(indices) > _N_NAMED else "")
