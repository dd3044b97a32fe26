"""The batch sizes that the memory benchmark measures before it predicts."""

from __future__ import annotations

import pytest
from benchmarks._memory_steps import choose_next, is_settled, measure_until_settled

from fulltilt.tuner.search.model.memory import MemoryCurve

POWERS = tuple(2**k for k in range(11))


def bent(batch):
    """GiB: the optimizer's step below batch 10, from there on the backward pass, which grows."""
    return max(4.0 + 0.001 * batch, 2.0 + 0.2 * batch)


FAKE = {batch: bent(batch) for batch in POWERS}


def test_with_fake_points_two_or_three_real_ones_are_enough():
    curve = measure_until_settled(MemoryCurve(fake=FAKE), POWERS, lambda batch: 0.4 + 1.02 * bent(batch))
    assert len(curve.real) <= 3
    assert min(curve.real) > 10, "a first point before the bend would show no growth"
    assert is_settled(curve)
    assert curve.predict_gib(512).gib == pytest.approx(0.4 + 1.02 * bent(512), rel=0.01)


def test_without_fake_points_batches_double_until_the_slope_repeats():
    curve = measure_until_settled(MemoryCurve(), POWERS, bent)
    assert list(curve.real) == [1, 2, 4, 8, 16, 32, 64]
    assert curve.predict_gib(1024).gib == pytest.approx(bent(1024))


def test_a_peak_that_came_otherwise_than_predicted_asks_for_another():
    """Real peaks grow faster from 16 on, which no fake point says."""
    curve = measure_until_settled(MemoryCurve(fake=FAKE), POWERS, lambda batch: bent(batch) + 0.3 * max(0, batch - 16))
    assert max(curve.real) > 32


def test_growth_that_hardly_shows_is_not_believed():
    flat = {batch: 4.0 + 1e-4 * batch for batch in POWERS}
    curve = MemoryCurve(real={1: flat[1], 2: flat[2]}, fake=flat)
    assert not is_settled(curve)
    assert choose_next(curve, POWERS) == 4


def test_where_no_fake_peak_grows_the_largest_batch_is_measured():
    assert choose_next(MemoryCurve(fake=dict.fromkeys(POWERS, 4.0)), POWERS) == 1024


def test_batches_double_even_where_candidates_lie_closer():
    curve = MemoryCurve(real={16: bent(16)}, fake=FAKE)
    assert choose_next(curve, range(8, 129, 8)) == 32
    assert choose_next(curve, [16, 24]) == 24
    assert choose_next(curve, [8, 16]) is None
