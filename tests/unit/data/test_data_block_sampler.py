"""Block shuffle: every row once, out of few blocks at a time, and no further from a full shuffle than it says."""

import numpy as np
import pytest
import torch

from fulltilt.data import BlockSampler, EpochSampler
from fulltilt.data.loading.block_sampler import compute_batch_variance_ratio, compute_meeting_share
from fulltilt.data.loading.sampler import BatchOrder
from fulltilt.errors import DataError

N, B, W, BATCH = 1200, 20, 6, 40  # samples, rows a block, blocks a window, rows a batch
EDGES = np.arange(0, N + B, B)


def build_orders(n_epochs, edges=EDGES, n_mixed=W):
    sampler = BlockSampler(edges, n_mixed, seed=3)
    for epoch in range(n_epochs):
        sampler.set_epoch(epoch)
        yield sampler.compute_order()


def test_every_epoch_is_a_permutation_of_its_own_whose_windows_are_whole_blocks_shuffled():
    orders = list(build_orders(2))
    assert not np.array_equal(*orders)
    for order in orders:
        assert sorted(order.tolist()) == list(range(N))
        for window in order.reshape(-1, B * W):
            blocks, counts = np.unique(window // B, return_counts=True)
            assert len(blocks) == W
            assert set(counts) == {B}
            assert len(np.unique(window[:B] // B)) > 1


def test_blocks_of_unequal_size_and_a_window_that_is_not_full():
    edges = np.array([0, 3, 4, 10, 17, 18])
    sampler = BlockSampler(edges, 2, seed=0)
    order = list(sampler)
    assert sorted(order) == list(range(18))
    block_of = np.searchsorted(edges, order, side="right") - 1
    seen = list(dict.fromkeys(block_of.tolist()))
    n_first = int(np.diff(edges)[seen[:2]].sum())
    assert set(block_of[:n_first]) == set(seen[:2]), "two blocks to their end before a third begins"
    assert BlockSampler(np.array([0, 7]), 5, seed=0).compute_order().tolist() != list(range(7))


def test_an_epoch_goes_on_where_it_stopped():
    whole, rest = BlockSampler(EDGES, W, seed=1), BlockSampler(EDGES, W, seed=9)
    whole.set_epoch(4)
    expected = list(whole)
    whole.set_epoch(4, start_index=777)
    rest.load_state_dict(whole.state_dict())
    assert list(rest) == expected[777:]
    assert len(rest) == N - 777


@pytest.mark.parametrize(("edges", "n_mixed"), [(EDGES, W + 1), (np.arange(0, N + 40, 40), W)])
def test_a_position_in_another_order_is_refused(edges, n_mixed):
    with pytest.raises(DataError, match="60 blocks, 6 mixed, this one has"):
        BlockSampler(edges, n_mixed, seed=1).load_state_dict(BlockSampler(EDGES, W, seed=1).state_dict())
    with pytest.raises(DataError, match="belongs to an order of None blocks"):
        BlockSampler(EDGES, W, seed=1).load_state_dict(EpochSampler(N, True, 1).state_dict())


@pytest.mark.parametrize(("edges", "n_mixed"), [([0, 5], 0), ([0], 1), ([0, 5, 5], 1), ([1, 5], 1)])
def test_blocks_that_are_none_are_refused(edges, n_mixed):
    with pytest.raises(DataError, match="must be 1 or more"):
        BlockSampler(np.array(edges), n_mixed, seed=0)


def test_pairs_of_other_blocks_meet_almost_as_often_as_fully_shuffled():
    met = 0.0
    for order in build_orders(400):
        counts = (order.reshape(-1, BATCH, 1) // B == np.arange(N // B)).sum(axis=1)
        met += (BATCH**2 - (counts**2).sum(axis=1)).sum()
    measured = met / 400 / (N * (N - B))  # ordered pairs of rows of different blocks
    expected = (W - 1) / (N / B - 1) * (BATCH - 1) / (B * W - 1)
    assert measured == pytest.approx(expected, rel=0.02)
    assert measured / ((BATCH - 1) / (N - 1)) == pytest.approx(1 - 1 / W, rel=0.03)


@pytest.mark.parametrize("values", ["sorted by block", "in random order"])
def test_batch_means_vary_as_much_as_is_derived(values):
    rng, is_sorted = np.random.default_rng(0), values == "sorted by block"
    x = np.repeat(rng.normal(size=N // B), B) if is_sorted else rng.normal(size=N)
    between = 1.0 if is_sorted else x.reshape(-1, B).mean(axis=1).var() / x.var()
    means = np.concatenate([x[order].reshape(-1, BATCH).mean(axis=1) for order in build_orders(600)])
    ratio = means.var() / (x.var() / BATCH * (N - BATCH) / (N - 1))
    assert ratio == pytest.approx(compute_batch_variance_ratio(N, B, W, BATCH, between), rel=0.06)
    assert ratio <= ((1 + (BATCH - 1) / W) * 1.06 if is_sorted else 1.5)


def test_pairs_that_can_meet_are_the_share_that_is_stated_and_a_window_of_everything_is_a_full_shuffle():
    (order,) = build_orders(1)
    window_of = np.empty(N, dtype=int)
    window_of[order] = np.arange(N) // (B * W)
    same = (window_of[:, None] == window_of[None]).sum() - N
    assert same / (N * (N - 1)) == pytest.approx(compute_meeting_share(N, B, W))
    assert compute_meeting_share(N, B, N // B) == 1
    assert compute_batch_variance_ratio(N, B, N // B, BATCH) == 1
    assert compute_batch_variance_ratio(10**9, B, W, BATCH) == pytest.approx(1 + (BATCH - 1) / W, rel=0.2)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_indices_are_those_of_torch(drop_last, shuffle):
    sampler = EpochSampler(103, shuffle, 5)
    sampler.set_epoch(2, start_index=10)
    ours = BatchOrder(sampler, 10, drop_last)
    theirs = torch.utils.data.BatchSampler(sampler, 10, drop_last)
    assert [batch.tolist() for batch in ours] == list(theirs)
    assert len(ours) == len(theirs)
