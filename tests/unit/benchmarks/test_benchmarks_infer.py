"""The benchmarks of acceptance and stall: their short cuts are what they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from benchmarks import infer_acceptance, infer_stall
from benchmarks._runner import Context
from benchmarks.infer_acceptance import (
    BETTER,
    LIMIT,
    WORSE,
    draw_late,
    find_crossing,
    find_early_stop,
    list_early_stops,
)

from fulltilt.stats import judge_share


@pytest.mark.parametrize(
    ("odds", "share", "decision"), [(BETTER, 0.004, "accepted"), (WORSE, 0.02, "refused"), (WORSE, 0.05, "refused")]
)
def test_the_first_decision_is_that_of_looks_after_every_response(odds, share, decision):
    horizon = 1500
    late_at = draw_late(share, horizon, 12, seed=1)
    found = find_crossing(late_at, horizon, odds, is_before=odds is BETTER)
    for places, end in zip(late_at, found, strict=True):
        is_late = np.isin(np.arange(1, horizon + 1), places)
        looks = (n for n in range(1, horizon + 1) if judge_share(is_late[:n], LIMIT).decision == decision)
        assert end == next(looks, math.inf)


def test_loadgens_rule_passes_at_the_queries_of_its_table():
    table = list(itertools.islice(list_early_stops(0.99), 6))
    assert [table[0], table[1], table[2], table[5]] == [459, 662, 838, 1307]
    late_at = np.array([[500, 700, 5000], [100, 663, 9000], [10, 20, 30]])
    assert find_early_stop(late_at, 2000).tolist() == [459, 662, math.inf]


def test_a_quick_run_has_all_arms_and_targets():
    found = infer_acceptance.run(Context(device="cpu", quick=True))
    assert [target.name for target in found.targets][:2] == [
        "passes at the limit, share",
        "refusals at the limit, share",
    ]
    assert all(target.met is not False for target in found.targets)
    loadgen = next(arm for arm in found.arms if arm.case.startswith("1 % late") and arm.arm.startswith("LoadGen"))
    assert loadgen.median > 0.05, "the rule that ours replaces"


@pytest.mark.slow
def test_a_stall_is_seen_by_the_open_loop_only():
    with infer_stall.start_server(1.0) as url:
        seen = infer_stall.load_server(url, infer_stall.OPEN, 3.0, seed=0)
    assert seen.response_ms["p90"].measured >= 300
    with infer_stall.start_server(1.0) as url:
        hidden = infer_stall.load_server(url, infer_stall.CLOSED, 3.0, seed=0)
    assert hidden.response_ms["p90"].measured < seen.response_ms["p90"].measured / 3
