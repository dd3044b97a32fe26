"""The test of a share of late responses: what it errs, and how soon it decides, on synthetic responses."""

import math

import numpy as np
import pytest

from fulltilt.stats import compute_proportion_interval, estimate_dependence, judge_share
from fulltilt.stats.sequential import (
    BETTER,
    WORSE,
    compute_block_shares,
    compute_factors,
    compute_threshold,
    mix_bets,
)

LIMIT = 0.01
THRESHOLD = compute_threshold()


def draw_late(share, n_trials, n, seed):
    return np.random.default_rng(seed).random((n_trials, n)) < share


def find_highest(is_late, odds):
    """The largest logarithm of a bet's value over all looks, one after every response, of each trial."""
    n_late = np.cumsum(is_late, axis=1)[..., None]
    n_in_time = np.arange(1, is_late.shape[1] + 1)[:, None] - n_late
    late, in_time = compute_factors(LIMIT, odds)
    return mix_bets(n_late * np.log(late) + n_in_time * np.log(in_time)).max(axis=1)


@pytest.mark.parametrize("odds", [BETTER, WORSE])
def test_at_the_limit_one_in_a_hundred_is_decided_although_every_response_is_looked_at(odds):
    n_trials = 400
    n_wrong = int((find_highest(draw_late(LIMIT, n_trials, 3000, seed=1), odds) >= THRESHOLD).sum())
    assert compute_proportion_interval(n_wrong, n_trials, confidence=0.99)[0] <= 0.01, n_wrong


def test_a_third_of_the_allowed_share_is_accepted_within_4000_responses():
    n_trials = 300
    n_found = int((find_highest(draw_late(0.003, n_trials, 4000, seed=2), BETTER) >= THRESHOLD).sum())
    assert compute_proportion_interval(n_found, n_trials, confidence=0.99)[1] >= 0.95, n_found
    assert n_found > 0.9 * n_trials


def test_the_decision_is_that_of_the_bets_after_each_response():
    is_late = draw_late(0.05, 1, 400, seed=3)[0]
    ends = (find_highest(is_late[None, :n], WORSE)[0] for n in range(1, 401))
    first = next(n for n, highest in enumerate(ends, start=1) if highest >= THRESHOLD)
    decisions = [judge_share(is_late[:n], LIMIT).decision for n in (first - 1, first)]
    assert decisions == ["undecided", "refused"]


@pytest.mark.parametrize(("share", "needed"), [(0.01, (459, 660)), (0.05, (90, 130))])
def test_without_a_late_response_it_takes_a_third_more_than_one_look_would(share, needed):
    """459 is the least for p99 at 99 %, by LoadGen's table."""
    n = next(n for n in range(1, 2000) if judge_share(np.zeros(n), share).decision == "accepted")
    assert needed[0] < n < needed[1]
    assert judge_share(np.zeros(n), share, alpha=1e-3).decision == "undecided"


def test_all_late_is_refused_at_once_and_nothing_is_said_of_nothing():
    assert judge_share(np.ones(3), LIMIT).decision == "refused"
    assert judge_share([], LIMIT).decision == "undecided"
    assert judge_share(np.ones(10_000), LIMIT).evidence_against < math.inf
    assert judge_share(np.zeros(5000), LIMIT, dependence=math.inf).decision == "undecided"


def test_blocks_hold_every_response_of_whole_blocks_once():
    is_late = np.array([1, 0, 1, 1, 0, 0, 1, 1, 0, 1], dtype=float)
    assert compute_block_shares(is_late, 1.0).tolist() == is_late.tolist()
    assert compute_block_shares(is_late, 2.5).tolist() == pytest.approx([0.5, 2 / 3, 0.5, 2 / 3])
    assert compute_block_shares(is_late, 4.0).tolist() == [0.75, 0.5]


def test_one_stall_among_responses_that_wait_for_each_other_does_not_refuse_what_is_within_the_limit():
    is_late = np.zeros(20_000)
    is_late[200:300] = 1  # a second at 100 a second: half a per cent of all
    assert judge_share(is_late[:400], LIMIT).decision == "refused", "as if each were late on its own"
    for n in (400, 1000, 20_000):
        assert judge_share(is_late[:n], LIMIT, dependence=100).decision == "undecided"


def simulate_queues(utilization, n_trials, n, seed):
    """Responses of one worker that takes a second for each request, after 2,000 others; synthetic."""
    gaps = np.random.default_rng(seed).exponential(1 / utilization, (n + 2000, n_trials))
    waiting, responses = np.zeros(n_trials), np.empty((n, n_trials))
    for i, gap in enumerate(gaps):
        waiting = np.maximum(0.0, waiting - gap) + 1
        if i >= 2000:
            responses[i - 2000] = waiting
    return responses.T


def test_with_blocks_a_queue_at_the_limit_is_hardly_ever_accepted_and_without_them_often():
    limit_s = np.quantile(simulate_queues(0.7, 200, 3000, seed=4), 1 - LIMIT)
    n_trials, looks = 300, [int(600 * 1.15**k) for k in range(14)]
    is_late = simulate_queues(0.7, n_trials, looks[-1], seed=5) > limit_s
    dependence = 1 + 0.7 / (1 - math.sqrt(0.7)) ** 2
    n_wrong = {
        blocks: sum(
            any(judge_share(trial[:n], LIMIT, dependence=blocks).decision == "accepted" for n in looks)
            for trial in is_late
        )
        for blocks in (1.0, dependence)
    }
    assert compute_proportion_interval(n_wrong[dependence], n_trials, confidence=0.99)[0] <= 0.01, n_wrong
    assert n_wrong[1.0] > 0.05 * n_trials, n_wrong


def test_the_dependence_of_neighbours_is_estimated():
    rng = np.random.default_rng(6)
    noise = rng.normal(size=20_000)
    assert estimate_dependence(noise) < 1.3
    alike = np.empty_like(noise)
    alike[0] = noise[0]
    for i in range(1, len(noise)):
        alike[i] = 0.9 * alike[i - 1] + noise[i]
    assert estimate_dependence(alike) == pytest.approx(19, rel=0.3), "(1 + 0.9) / (1 - 0.9)"
    assert [estimate_dependence(values) for values in ([], [1.0], [2.0] * 50)] == [1.0, 1.0, 1.0]
