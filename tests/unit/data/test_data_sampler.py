"""Order of samples: a pure function of seed and epoch."""

import numpy as np
import pytest
import torch

from fulltilt.data import EpochSampler
from fulltilt.data.loading.sampler import BatchOrder, Share
from fulltilt.data.seeds import compute_seed
from fulltilt.errors import DataError


def test_the_order_is_a_permutation_that_depends_on_nothing_but_seed_and_epoch():
    sampler, again = EpochSampler(100, True, 7), EpochSampler(100, True, 7)
    orders = [list(EpochSampler(100, True, 8))]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len(set(map(tuple, orders))) == 4
    torch.rand(3)
    again.set_epoch(2)
    assert list(again) == orders[-1]


def test_start_index_continues_the_same_order_and_shortens_the_length():
    whole, rest = EpochSampler(40, True, 3), EpochSampler(40, True, 3)
    whole.set_epoch(2)
    rest.set_epoch(2, start_index=33)
    assert list(rest) == list(whole)[33:]
    assert len(rest) == 7
    rest.set_epoch(3)
    assert len(rest) == 40
    plain = EpochSampler(5, False, 0)
    plain.set_epoch(4, start_index=2)
    assert list(plain) == [2, 3, 4]


def test_state_goes_on_in_another_sampler_of_as_many_samples():
    one = EpochSampler(20, True, 11)
    one.set_epoch(6, start_index=8)
    other = EpochSampler(20, True, 99)
    other.load_state_dict(one.state_dict())
    assert list(other) == list(one)
    assert all(type(value) is int for value in one.state_dict().values())
    with pytest.raises(DataError, match="20 samples, this one holds 21"):
        EpochSampler(21, True, 0).load_state_dict(EpochSampler(20, True, 0).state_dict())


def test_no_samples_and_a_start_outside_of_the_dataset_are_refused():
    for start in (-1, 11):
        with pytest.raises(DataError, match="holds 10 samples"):
            EpochSampler(10, True, 0).set_epoch(0, start_index=start)
    with pytest.raises(DataError, match="0 samples"):
        EpochSampler(0, True, 0)


def test_seeds_do_not_collide_where_parts_are_swapped_or_small():
    seeds = {compute_seed(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(seeds) == 8000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert compute_seed(2**64 - 1, 3) == compute_seed(-1, 3)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_parts_of_all_ranks_are_the_batches_of_one(n_ranks, drop_last):
    """They go on at sample 12 of 49, in batches of 8: the last one has 5, fewer than there are ranks"""
    sampler = EpochSampler(49, shuffle=True, seed=5)
    sampler.set_epoch(0, 12)
    whole = list(BatchOrder(sampler, 8, drop_last))
    parts = [list(BatchOrder(sampler, 8, drop_last, Share(rank, n_ranks))) for rank in range(n_ranks)]
    for index, batch in enumerate(whole):
        sizes = [Share(rank, n_ranks).cut(len(batch)) for rank in range(n_ranks)]
        counted = [mine[index][: cut.stop - cut.start] for mine, cut in zip(parts, sizes, strict=True)]
        assert np.concatenate(counted).tolist() == batch.tolist()
        assert max(map(len, counted)) - min(map(len, counted)) <= 1
        assert all(len(mine[index]) > 0 for mine in parts)  # every rank takes part in every step
