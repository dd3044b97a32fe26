"""Block shuffle: an order that is random enough to train on and sequential enough to read fast.

The rows of a file are cut into blocks of B rows. Every epoch draws a new order of the n = N/B blocks, takes W of them
at a time (a window of M = W·B rows), and shuffles the rows of a window. A reader that keeps the window in memory then
reads the file in whole blocks, once per epoch.

What it costs, against a full shuffle, for batches of b rows inside a window:

- *Pairs.* A share (M − 1)/(N − 1) of all pairs of rows can meet in a batch of one epoch. Over the epochs every pair
  can: blocks are drawn anew.
- *Batches.* Let a row carry a number with variance σ² over the file, of which the share ρ lies between the means of
  blocks (0: rows lie in random order; 1: the file is sorted by it). The mean of a window then varies by
  V = ρσ²/W · (n − W)/(n − 1), and the mean of a batch by

      V + (σ² − V)/b · (M − b)/(M − 1)        against   σ²/b · (N − b)/(N − 1) of a full shuffle.

  Their ratio is 1 for a file in random order and **at most about 1 + (b − 1)/W**: batches of 256 rows out of 64 blocks
  vary up to 5 times as much (in variance) where the file is sorted by what is learnt. Repack such a file in random
  order, or raise W.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fulltilt.data.loading.sampler import EpochSampler
from fulltilt.data.seeds import compute_seed
from fulltilt.errors import DataError


class BlockSampler(EpochSampler):
    """Yields every index once per epoch, window by window.

    Args:
        edges: (n + 1,) first index of every block, and the number of samples; blocks may differ in size.
        n_mixed: W, blocks in a window.
    """

    def __init__(self, edges: np.ndarray, n_mixed: int, seed: int, *, share_epoch: bool = False):
        if n_mixed < 1 or len(edges) < 2 or edges[0] != 0 or not (np.diff(edges) > 0).all():
            raise DataError(f"{len(edges) - 1} blocks of which {n_mixed} are mixed: both must be 1 or more, none empty")
        super().__init__(int(edges[-1]), True, seed, share_epoch=share_epoch)
        self.edges, self.n_mixed = np.asarray(edges, dtype=np.int64), n_mixed

    @property
    def _blocks(self) -> dict[str, int]:
        return {"n_blocks": len(self.edges) - 1, "n_mixed": self.n_mixed}

    def compute_order(self) -> np.ndarray:
        generator = torch.Generator().manual_seed(compute_seed(self.seed, self.epoch))
        n_blocks = len(self.edges) - 1
        blocks = torch.randperm(n_blocks, generator=generator).numpy()
        starts, sizes = self.edges[blocks], np.diff(self.edges)[blocks]
        firsts = np.cumsum(sizes) - sizes
        in_order = np.arange(self.n_samples) - np.repeat(firsts - starts, sizes)
        for window in np.split(in_order, firsts[self.n_mixed :: self.n_mixed]):  # views: shuffled in place
            window[:] = window[torch.randperm(len(window), generator=generator).numpy()]
        return in_order

    def state_dict(self) -> dict[str, int]:
        return super().state_dict() | self._blocks

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore a position; DataError where it belongs to another dataset or another way of shuffling."""
        mine = self._blocks
        saved = {name: state.get(name) for name in mine}
        if saved != mine:
            raise DataError(
                f"the saved position belongs to an order of {saved['n_blocks']} blocks, {saved['n_mixed']} mixed, this "
                f"one has {mine['n_blocks']} and {mine['n_mixed']}; resume with the placement the run was started with"
            )
        super().load_state_dict(state)


def compute_meeting_share(n_samples: int, block_rows: int, n_mixed: int) -> float:
    """Compute the share of all pairs of rows that can meet in a batch of one epoch."""
    return min(1.0, (block_rows * n_mixed - 1) / max(1, n_samples - 1))


def compute_batch_variance_ratio(
    n_samples: int, block_rows: int, n_mixed: int, batch_size: int, between_share: float = 1.0
) -> float:
    """Compute the variance of a batch's mean over that under a full shuffle.

    ``between_share`` is ρ, the share of the variance between the means of blocks: 1 is the worst case.
    """
    n_blocks, window = n_samples / block_rows, block_rows * n_mixed
    if window >= n_samples:
        return 1.0
    between = between_share / n_mixed * (n_blocks - n_mixed) / (n_blocks - 1)
    within = (1 - between) / batch_size * (window - batch_size) / (window - 1)
    return (between + within) / ((n_samples - batch_size) / (n_samples - 1) / batch_size)
