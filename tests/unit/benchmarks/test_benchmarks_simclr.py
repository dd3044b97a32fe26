"""How ``simclr`` judges what was learnt."""

from __future__ import annotations

import pytest
from benchmarks.simclr import MIN_MARGIN, judge_margins


def test_the_margin_over_seeds_has_students_interval():
    target = judge_margins([0.04, 0.05, 0.06, 0.05, 0.04, 0.06])
    # standard deviation 0.008944 over the root of 6, times 2.5706, the t quantile with 5 degrees of freedom
    assert target.measured == pytest.approx(0.05)
    assert target.ci95 == pytest.approx((0.05 - 0.009386, 0.05 + 0.009386), abs=1e-6)
    assert target.met is True


def test_seeds_that_lie_apart_decide_nothing():
    assert judge_margins([MIN_MARGIN + d for d in (-0.02, 0.03, -0.01, 0.02, 0.0, 0.01)]).met is None
    assert judge_margins([1.0]).met is None, "one seed says nothing of others"
