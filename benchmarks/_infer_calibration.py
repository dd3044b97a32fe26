"""Fit a simulated server to a real one: what its calls and its requests take beside each other."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from http.client import HTTPException
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from fulltilt.errors import FulltiltError
from fulltilt.infer.load.http import PATIENCE_S
from fulltilt.infer.search.accept import load_server
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate
from fulltilt.infer.search.simulate import Arrivals, Service, compute_quantile_s, simulate_responses_s

CALIBRATION_S = 6.0  # of each of two loads
SELDOM, OFTEN = 0.15, 0.65  # of what is answered with requests waiting: few requests meet, and many do
N_ROUNDS, N_HALVINGS = 3, 10
WAITS = np.random.default_rng(0).exponential(1.0, 1000)  # of calls, with a mean of one
FITTED = 0.85  # that quantile of responses: queues show in it, and other work of the machine hardly


def cut(arrivals: Arrivals, n: int) -> Arrivals:
    """Keep the first ``n``."""
    return Arrivals(unit_s=arrivals.unit_s[:n], lengths=arrivals.lengths[:n])


def calibrate(url: str, row: Candidate, goal: Goal, arrivals: Arrivals, served_per_s: float) -> Service:
    """Measure in the server what the surface does not know, at two loads by the same arrivals that are simulated.

    A call takes longer than where it follows another on an idle machine: the server tells how much in the mean, and it
    varies as waits for the interpreter and for a core do, about exponentially. Where few requests meet, the rest of a
    response is what it takes beside the model. How much of that a sample keeps from others shows in the queue where
    many meet.

    Args:
        served_per_s: Requests that are answered where some always wait.

    Raises:
        FulltiltError: the server is gone, or its model was never called.
    """
    assert row.surface is not None
    assert row.policy is not None
    policy, plain = row.policy, row.surface.build_service()
    seldom_per_s, often_per_s = SELDOM * served_per_s, OFTEN * served_per_s
    if seldom_per_s * CALIBRATION_S < 1:
        return plain  # requests come so seldom that the loads might have none

    def load(rate: float) -> tuple[NDArray[np.float64], Arrivals]:
        response_s = load_server(url, goal, rate, seconds=CALIBRATION_S).select().response_s
        return np.sort(np.minimum(response_s, CALIBRATION_S)), cut(arrivals, len(response_s))

    seldom_s, seldom = load(seldom_per_s)
    before = read_calls(url)
    often_s, often = load(often_per_s)
    told_s, n_calls, n_samples = read_calls(url) - before
    if not n_calls:
        raise FulltiltError("no request reached the model of the server")

    def build(call_s: float, sample_s: float) -> Service:
        bare = dataclasses.replace(plain, call_s=[call_s * each for each in WAITS], sample_s=sample_s)
        alone_s = np.sort(simulate_responses_s(seldom, seldom_per_s, policy, bare))
        beside_s = np.maximum(seldom_s[: len(alone_s)] - alone_s, 0.0)
        return dataclasses.replace(bare, request_s=beside_s.tolist() or [0.0])

    def simulate(service: Service) -> tuple[float, float]:
        """Simulate the load at which many meet → seconds of calls for each sample, and the fitted quantile."""
        calls, longer_s = list[tuple[float, int]](), statistics.fmean(service.call_s)

        def estimate_s(batch: int, length: int) -> float:
            calls.append((plain.estimate_s(batch, length) + longer_s, batch))
            return plain.estimate_s(batch, length)

        counted = dataclasses.replace(service, estimate_s=estimate_s)
        responses_s = simulate_responses_s(often, often_per_s, policy, counted)
        return np.divide(*np.sum(calls, axis=0)), compute_quantile_s(responses_s, FITTED)

    def improve(call_s: float, sample_s: float) -> tuple[float, float]:
        call_s = halve(2 * told_s / n_calls, lambda s: simulate(build(s, sample_s))[0] < told_s / n_samples)
        return call_s, halve(1 / often_per_s, lambda s: simulate(build(call_s, s))[1] < often_fitted_s)

    often_fitted_s, found = float(np.quantile(often_s, FITTED)), (0.0, 0.0)
    for _ in range(N_ROUNDS):
        found = improve(*found)
    return build(*found)


def halve(most: float, is_less: Callable[[float], bool]) -> float:
    """Find by halving the largest number up to ``most`` that ``is_less``."""
    low, high = 0.0, most
    for _ in range(N_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if is_less(middle) else (low, middle)
    return low


def read_calls(url: str) -> NDArray[np.float64]:
    """Read from a server's metrics the seconds of the model's calls so far, how many they were, and their samples."""
    try:
        with urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    except (OSError, HTTPException) as error:
        raise FulltiltError(f"the server was gone under load ({error})") from None
    names = ("model_seconds_sum", "model_seconds_count", "batch_samples_sum")
    return np.array([float(text.partition(f"\nfulltilt_infer_{name} ")[2].partition("\n")[0]) for name in names])
