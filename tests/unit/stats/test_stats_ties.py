import math

import pytest

from fulltilt.stats import find_ties


def test_the_best_alone_when_the_rest_is_far():
    assert find_ties([(50, (49, 51)), (100, (99, 101)), (90, (89, 91))]) == (1,)


def test_within_the_indifference_zone_rows_tie_best_first_whatever_their_intervals():
    assert find_ties([(98.5, (98.4, 98.6)), (100, (99.9, 100.1)), (97, (96.9, 97.1))]) == (1, 0)


def test_a_gap_the_intervals_cannot_tell_is_a_tie_only_up_to_the_second_limit():
    noisy = (-20.0, 20.0)
    rows = [(v, (v + noisy[0], v + noisy[1])) for v in (100.0, 97.5, 96.0)]
    assert find_ties(rows) == (0, 1)


def test_a_gap_beyond_both_half_widths_is_no_tie():
    assert find_ties([(100, (99, 101)), (97, (96, 98))]) == (0,)


def test_ties_do_not_chain():
    assert find_ties([(v, (v, v)) for v in (100, 98.5, 97, 95.5)]) == (0, 1)


@pytest.mark.parametrize("unknown", [None, (math.nan, math.nan), (0.0, math.inf)])
def test_an_unknown_interval_ties_by_value_alone(unknown):
    assert find_ties([(100, (90, 110)), (97, unknown), (99, unknown)]) == (0, 2)


def test_the_zone_is_the_callers():
    assert find_ties([(100, None), (97, None)], indifference_pct=4) == (0, 1)


def test_no_rows_no_ties():
    assert find_ties([]) == ()


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0, math.inf])
def test_only_measured_values_are_compared(value):
    with pytest.raises(ValueError, match="row 1"):
        find_ties([(1.0, None), (value, None)])
