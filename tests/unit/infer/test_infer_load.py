"""The open loop on a fake clock: nothing the worker does can hide a wait."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from fulltilt.infer.load.arrivals import plan_arrivals
from fulltilt.infer.load.loop import serve
from fulltilt.stats import compute_quantile_interval
from fulltilt.stats.intervals import count_needed


class Worker:
    """A clock that sleeping and answering move on."""

    def __init__(self, service_s, stalls=()):
        self.now_s, self.n_done = 100.0, 0
        self._service_s, self._stalls = service_s, dict(stalls)

    def clock(self):
        return self.now_s

    def sleep(self, seconds):
        assert seconds > 0
        self.now_s += seconds

    def handle(self):
        self.now_s += self._service_s + self._stalls.get(self.n_done, 0.0)
        self.n_done += 1
        return self._service_s

    def serve(self, arrivals_s, **more):
        return serve(arrivals_s, self.handle, clock=self.clock, sleep=self.sleep, **more)


def test_a_stall_of_one_second_is_in_the_responses_of_all_who_waited():
    arrivals_s = plan_arrivals("server", 6000, 100, seed=1)
    answers = Worker(0.001, stalls={3000: 1.0}).serve(arrivals_s)
    assert np.quantile([a.response_s for a in answers], 0.99) >= 0.3
    own_s = [a.end_s - a.start_s for a in answers]
    assert np.quantile(own_s, 0.99) < 0.0011  # what a closed loop would report
    assert 55 < answers[-1].due_s < 65


def test_no_request_is_answered_before_it_is_due_and_they_are_answered_in_order():
    arrivals_s = plan_arrivals("server", 500, 50, seed=2)
    answers = Worker(0.015).serve(arrivals_s)
    assert [a.due_s for a in answers] == arrivals_s
    assert all(a.start_s >= a.due_s - 1e-9 for a in answers)
    assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(answers))


def test_responses_of_an_overloaded_worker_grow_by_what_it_lags_behind():
    answers = Worker(0.02).serve(plan_arrivals("server", 1000, 100, seed=3))
    responses_s = np.array([a.response_s for a in answers])
    assert responses_s[-100:].mean() > 5 * responses_s[:100].mean()
    assert responses_s[-1] == pytest.approx(1000 * 0.02 - answers[-1].due_s, abs=0.1)


def test_arrivals_are_poisson_at_the_stated_rate_and_the_same_for_a_seed():
    n, rate_per_s = 40_000, 25.0
    arrivals_s = np.array(plan_arrivals("server", n, rate_per_s, seed=4))
    gaps_s = np.diff(arrivals_s, prepend=0.0)
    z = NormalDist().inv_cdf(1 - 1e-4)  # each bound fails by chance once in 5,000 seeds; this seed is fixed
    assert abs(gaps_s.mean() * rate_per_s - 1) < z / math.sqrt(n)
    for share in (0.1, 0.5, 0.9, 0.99):  # of an exponential distribution, by the binomial's normal bound
        below = (gaps_s < -math.log(1 - share) / rate_per_s).mean()
        assert abs(below - share) < z * math.sqrt(share * (1 - share) / n)
    counts = np.histogram(arrivals_s, bins=np.arange(0, int(arrivals_s[-1])))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=z * math.sqrt(2 / len(counts)))
    assert abs(np.corrcoef(gaps_s[:-1], gaps_s[1:])[0, 1]) < z / math.sqrt(n)
    assert (
        plan_arrivals("server", 5, rate_per_s, seed=4)
        == arrivals_s[:5].tolist()
        != plan_arrivals("server", 5, rate_per_s, seed=5)
    )


@pytest.mark.parametrize(("quantile", "n"), [(0.99, 368), (0.95, 72), (0.9, 36), (0.5, 6)])
def test_as_many_requests_are_sent_as_the_percentile_needs_and_no_fewer_would_do(quantile, n):
    assert count_needed(quantile) == n
    assert 1 - quantile**n >= 0.975 > 1 - quantile ** (n - 1)  # P(largest of n is above the quantile)
    assert compute_quantile_interval(range(n), quantile)[1] == n - 1


def test_a_stream_sends_the_next_request_when_the_one_before_is_answered():
    for scenario in ("single", "multi"):
        answers = Worker(0.02, stalls={3: 1.0}).serve(plan_arrivals(scenario, 10, None, seed=0))
        assert [a.response_s for a in answers] == pytest.approx([0.02] * 3 + [1.02] + [0.02] * 6)
        assert [b.due_s - a.end_s for a, b in itertools.pairwise(answers)] == pytest.approx([0.0] * 9)


def test_offline_everything_is_due_at_once():
    answers = Worker(0.02).serve(plan_arrivals("offline", 10, None, seed=0))
    assert [a.response_s for a in answers] == pytest.approx([0.02 * (i + 1) for i in range(10)])


def test_a_load_ends_when_it_has_told_enough():
    answers = Worker(0.02).serve(plan_arrivals("server", 500, 50, seed=2), is_enough=lambda answers: len(answers) == 37)
    assert len(answers) == 37
