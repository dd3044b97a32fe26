"""Order samples by a pure function of (seed, epoch), so that a run can resume anywhere."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from fulltilt.data.seeds import compute_seed
from fulltilt.errors import DataError


class EpochSampler(Sampler[int]):
    """Yields an epoch's remaining indices once each; if shuffled, seed and epoch alone decide their order.

    Args:
        share_epoch: Put the epoch into memory that worker processes share, so that augmentation follows it.

    Attributes:
        start_index: How many samples of this epoch were consumed already and are left out.
        n_left_out: How many samples at the end of every epoch's order are not used.
    """

    def __init__(self, n_samples: int, shuffle: bool, seed: int, *, share_epoch: bool = False):
        if n_samples < 1:
            raise DataError(f"the dataset holds {n_samples} samples; at least 1 is needed")
        self.n_samples, self.shuffle, self.seed = n_samples, shuffle, seed
        self.start_index = self.n_left_out = 0
        self.epoch_cell = torch.zeros(1, dtype=torch.int64)
        if share_epoch:
            self.epoch_cell.share_memory_()

    @property
    def epoch(self) -> int:
        return int(self.epoch_cell[0])

    def set_epoch(self, epoch: int, start_index: int = 0) -> None:
        """Choose the epoch of the next ``iter``, from its sample number ``start_index`` on.

        Call it between two passes over the loader: workers that are still busy would draw from the new epoch.
        """
        if not 0 <= start_index <= self.n_samples:
            raise DataError(
                f"cannot start epoch {epoch} at sample {start_index}: the dataset holds {self.n_samples} samples; "
                f"resume with the dataset the run was started with"
            )
        self.epoch_cell[0] = epoch
        self.start_index = start_index

    def __len__(self) -> int:
        """Count what is left of this epoch."""
        return max(0, self.n_samples - self.n_left_out - self.start_index)

    def __iter__(self) -> Iterator[int]:
        return iter(self.compute_rest().tolist())

    def compute_rest(self) -> np.ndarray:
        """Compute the indices of this epoch that are still to come."""
        return self.compute_order()[self.start_index : self.n_samples - self.n_left_out]

    def compute_order(self) -> np.ndarray:
        """Compute all indices (n_samples,) of this epoch."""
        if not self.shuffle:
            return np.arange(self.n_samples)
        generator = torch.Generator().manual_seed(compute_seed(self.seed, self.epoch))
        return torch.randperm(self.n_samples, generator=generator).numpy()

    def state_dict(self) -> dict[str, int]:
        """Return the position that ``set_epoch`` chose; the caller adds what it consumed since."""
        position = {"epoch": self.epoch, "start_index": self.start_index, "seed": self.seed}
        return position | {"n_samples": self.n_samples, "shuffle": int(self.shuffle)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position; DataError where it belongs to a dataset of another length."""
        if state["n_samples"] != self.n_samples:
            raise DataError(
                f"the saved position is in a dataset of {state['n_samples']} samples, this one holds "
                f"{self.n_samples}; resume with the dataset the run was started with, or start a new run"
            )
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self.set_epoch(int(state["epoch"]), int(state["start_index"]))


class Share(NamedTuple):
    """Selects the part of each global batch that one distributed rank loads.

    Parts follow each other in the batch and differ by one sample at most, the first ones being larger. The batches do
    not depend on the number of processes.
    """

    rank: int = 0
    n_ranks: int = 1

    def cut(self, n_samples: int) -> slice:
        """Return the part of a batch of ``n_samples``; empty for the last ranks where there are too few."""
        each, rest = divmod(n_samples, self.n_ranks)
        first = self.rank * each + min(self.rank, rest)
        return slice(first, first + each + (self.rank < rest))

    def take(self, indices: np.ndarray) -> np.ndarray:
        """Take this part of a batch, or its first sample where the part is empty.

        Every process has to take part in the step; the caller gives the sample of an empty part no weight.
        """
        part = indices[self.cut(len(indices))]
        return part if len(part) else indices[:1]


class BatchOrder:
    """Yields the batches of torch's BatchSampler, or a share of each, as arrays instead of lists of Python numbers."""

    def __init__(self, sampler: EpochSampler, batch_size: int, drop_last: bool, share: Share | None = None):
        self.sampler, self.batch_size, self.drop_last, self.share = sampler, batch_size, drop_last, share

    def __len__(self) -> int:
        whole, rest = divmod(len(self.sampler), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self.sampler.compute_rest()
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            batch = order[first : first + self.batch_size]
            yield batch if self.share is None else self.share.take(batch)
