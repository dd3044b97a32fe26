"""What is said of the rows of a load: nothing is dropped, and nothing is said that is the generator's doing."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from fulltilt.infer.load.outcome import (
    BROKEN,
    CUT_OFF,
    OPEN,
    TIMED_OUT,
    LoadPlan,
    Responses,
    build_outcome,
    judge_responses,
)
from fulltilt.records import dumps
from fulltilt.report.latency import count_histogram
from fulltilt.stats import compute_proportion_interval

PLAN = LoadPlan(url="http://here", requests_per_s=100.0, limit_s=0.1)


def build_rows(responses_s, *, handled_s=0.0, status=200, gap_s=0.01):
    return [
        [i * gap_s, i * gap_s + handled_s, i * gap_s + response_s, status, 0, 0, 0]
        for i, response_s in enumerate(responses_s)
    ]


def draw_responses_s(n, seed=0):
    return np.random.default_rng(seed).gamma(4, 0.005, n)


def test_what_failed_is_late_and_infinite_in_the_percentiles():
    rows = build_rows(draw_responses_s(1000))
    for number, status in ((10, 429), (20, 503), (30, 504), (40, TIMED_OUT), (50, BROKEN)):
        rows[number][3] = status
    outcome = build_outcome(Responses(rows), PLAN, "schedule")
    assert outcome.unanswered == {"connection broken": 1, "timed out": 1, "429": 1, "503": 1, "504": 1}
    assert outcome.n_requests == 1000
    assert outcome.late_share is not None
    assert outcome.late_share.measured == pytest.approx(0.005)
    assert outcome.response_ms["p999"].measured == math.inf
    assert outcome.response_ms["p99"].measured < 100
    assert '"max": {\n   "measured": null' in dumps(outcome, indent=1)
    assert {*outcome.null_reasons} == {"response_ms", "tokens_per_s"}
    without = build_outcome(Responses(rows), dataclasses.replace(PLAN, limit_s=None), "schedule")
    assert {*without.null_reasons} == {"response_ms", "tokens_per_s", "verdict", "late_share", "test"}


def test_the_first_word_counts_from_when_the_request_was_due_and_words_of_whole_texts_count():
    rows = [[i, i + 0.1, i + 0.5, 200, 0, 8, i + 0.25] for i in range(100)]
    rows[7][3:] = [CUT_OFF, 0, 3, 7.3]
    outcome = build_outcome(Responses(rows), LoadPlan(url="u", requests_per_s=1.0, new_tokens=8), "schedule")
    assert outcome.first_token_ms["p90"].measured == pytest.approx(250)
    assert outcome.first_token_ms["p999"].measured == math.inf
    assert outcome.tokens_per_s == pytest.approx(8 * 99 / 99.5)
    assert outcome.unanswered == {"ended with an error": 1}
    assert "tokens_per_s" not in outcome.null_reasons


@pytest.mark.parametrize(("n_late", "verdict"), [(0, "met"), (5, "not proven"), (60, "missed")])
def test_a_limit_is_met_or_missed_by_the_test_of_late_responses(n_late, verdict):
    responses_s = np.clip(draw_responses_s(900), 0, 0.09)
    responses_s[:: 900 // n_late if n_late else 901] += 0.2 if n_late else 0.0
    found, why, test = judge_responses(Responses(build_rows(responses_s)), PLAN)
    assert (found, why) == (verdict, None)
    assert test.n_blocks <= 900


def test_responses_after_the_first_that_is_open_and_may_be_in_time_are_not_counted():
    rows = build_rows([0.02] * 100)
    rows[60] = [0.6, 0.6, 0.65, OPEN, 0, 0, 0]
    assert len(Responses(rows, PLAN.limit_s)) == 60
    rows[60][2] = 0.75  # it waits longer than the limit: late, whatever comes
    kept = Responses(rows, PLAN.limit_s)
    assert len(kept) == 100
    assert kept.count_unanswered() == {"no answer yet": 1}


def test_a_late_generator_is_not_blamed_on_the_server():
    rows = build_rows([0.15] * 1000, handled_s=0.14)
    verdict, why, _ = judge_responses(Responses(rows), PLAN)
    assert verdict == "not proven"
    assert why is not None
    assert "generator was late itself" in why
    outcome = build_outcome(Responses(rows), dataclasses.replace(PLAN, limit_s=None), "schedule")
    assert outcome.verdict is None
    assert "the percentile is its own" in str(outcome.why)
    assert outcome.generator_late_ms["p99"] == pytest.approx(140)
    late_but_in_time = build_rows([0.08] * 1000, handled_s=0.07)
    assert judge_responses(Responses(late_but_in_time), PLAN)[0] == "met", "from the schedule on it is within the limit"


@pytest.mark.parametrize(("last_s", "decision"), [(0.09, "undecided"), (0.024, "accepted")])
def test_a_queue_that_grows_is_not_accepted_although_nothing_is_late_yet(last_s, decision):
    rows = build_rows(np.linspace(0.005, last_s, 4000) + draw_responses_s(4000) / 100)
    verdict, why, test = judge_responses(Responses(rows), PLAN)
    assert (verdict, test.decision) == ("not proven", decision)
    assert why == ("responses grow for as long as the load lasts" if decision == "accepted" else None)


def test_a_histogram_holds_every_answer_between_bounds_that_meet():
    bins = count_histogram(np.sort(draw_responses_s(500)))
    assert sum(n for *_, n in bins) == 500
    assert all(high == pytest.approx(low) for (_, high, _), (low, *_) in itertools.pairwise(bins))
    assert count_histogram(np.full(7, 0.01))[0][2] == 7
    assert count_histogram(np.array([])) == []


def simulate_queues(utilization, n_trials, n, seed):
    """Responses of one worker that takes 10 ms for each request, after 500 others; synthetic."""
    gaps = np.random.default_rng(seed).exponential(0.01 / utilization, (n + 500, n_trials))
    waiting, responses_s = np.zeros(n_trials), np.empty((n, n_trials))
    for i, gap in enumerate(gaps):
        waiting = np.maximum(0.0, waiting - gap) + 0.01
        if i >= 500:
            responses_s[i - 500] = waiting
    return responses_s.T


@pytest.mark.parametrize("utilization", [0.3, 0.6, 0.85])
def test_a_queue_at_its_limit_is_hardly_ever_accepted_although_nothing_is_known_of_the_queue(utilization):
    n_trials, looks = 60, [int(620 * 1.4**k) for k in range(6)]
    limit_s = float(np.quantile(simulate_queues(utilization, 200, 4000, seed=1), 0.99))
    plan = dataclasses.replace(PLAN, limit_s=limit_s)
    n_wrong = sum(
        any(judge_responses(Responses(build_rows(trial[:n])), plan)[0] == "met" for n in looks)
        for trial in simulate_queues(utilization, n_trials, looks[-1], seed=2)
    )
    assert compute_proportion_interval(n_wrong, n_trials, confidence=0.99)[0] <= 0.01, n_wrong


def test_a_drift_far_below_the_limit_does_not_hold_the_decision_up():
    drift_s = 0.005 * (1 + 0.2 * np.sin(np.arange(1000) / 100))
    assert Responses(build_rows(drift_s)).compute_dependence(None) > 50
    assert judge_responses(Responses(build_rows(drift_s)), PLAN)[0] == "met"
