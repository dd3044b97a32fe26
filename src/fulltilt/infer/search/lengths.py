"""Describe how long real samples are, and into which lengths they fall with the least padding."""

import dataclasses
from collections.abc import Sequence

import numpy as np

N_BUCKETS = 4
N_BARS = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """The lengths of real samples, in their order; all 1 where no input varies.

    Attributes:
        edges: Upper ends of the buckets that pad least.
        padded_pct: Padded elements of all, with these buckets.
        padded_to_longest_pct: The same with every sample padded to the longest one.
        histogram: (from, up to, samples) of bars of equal width.
    """

    values: tuple[int, ...]
    edges: tuple[int, ...]
    padded_pct: float
    padded_to_longest_pct: float
    histogram: tuple[tuple[int, int, int], ...]

    @property
    def vary(self) -> bool:
        return len(set(self.values)) > 1

    @property
    def longest(self) -> int:
        return max(self.values)


def describe_lengths(values: Sequence[int]) -> Lengths:
    """Describe the lengths of real samples."""
    edges = compute_edges(values)
    padded = sum(min(edge for edge in edges if edge >= value) for value in values)
    counts, ends = np.histogram(values, bins=min(N_BARS, max(values) - min(values) + 1))
    bars = zip(ends[:-1], ends[1:], counts, strict=True)
    return Lengths(
        values=tuple(values),
        edges=edges,
        padded_pct=100 * (1 - sum(values) / padded),
        padded_to_longest_pct=100 * (1 - sum(values) / (max(values) * len(values))),
        histogram=tuple((int(low), int(high), int(n)) for low, high, n in bars),
    )


def compute_edges(values: Sequence[int], n_buckets: int = N_BUCKETS) -> tuple[int, ...]:
    """Compute the upper ends of at most ``n_buckets`` buckets, so that the fewest elements are padded.

    Dynamic programming over the distinct lengths: the best buckets up to one length are the best up to an earlier one,
    and one more. Exact. Cost: the square of the distinct lengths for each bucket.
    """
    lengths, counts = np.unique(np.asarray(values), return_counts=True)
    n = len(lengths)
    n_up_to = np.concatenate([[0], np.cumsum(counts)])
    sum_up_to = np.concatenate([[0], np.cumsum(counts * lengths)])
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    choices: list[np.ndarray] = []
    for _ in range(min(n_buckets, n)):
        # cost[i, j]: buckets up to length i-1, and one that holds lengths i to j
        cost = best[:n, None] + lengths * (n_up_to[1:] - n_up_to[:n, None]) - (sum_up_to[1:] - sum_up_to[:n, None])
        cost = np.where(np.arange(n)[:, None] <= np.arange(n), cost, np.inf)
        choices.append(np.argmin(cost, axis=0))
        best = np.concatenate([[np.inf], np.min(cost, axis=0)])
    edges, end = [], n
    for chosen in reversed(choices):
        edges.append(int(lengths[end - 1]))
        end = int(chosen[end - 1])
    return tuple(reversed(edges))
