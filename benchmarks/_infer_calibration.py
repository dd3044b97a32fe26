"""Fit a simulated server to a real one: what its calls and its requests take beside each other."""

from __future__ import annotations

import dataclasses
import statistics
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

CALIBRATION_S = 4.0  # of each of two loads
SELDOM = 0.2  # of the load, at which few requests meet
N_FITS, FITTED = 12, 0.75  # that quantile: queues hardly show below it, and above it other work of the machine does


def cut(arrivals: Arrivals, n: int) -> Arrivals:
    """Keep the first ``n``."""
    return Arrivals(unit_s=arrivals.unit_s[:n], lengths=arrivals.lengths[:n])


def calibrate(url: str, row: Candidate, goal: Goal, arrivals: Arrivals, requests_per_s: float) -> Service:
    """Measure in the server what the surface does not know, at two loads by the same arrivals that are simulated.

    The model's calls take longer beside the work on requests, which has the same cores and the interpreter's lock: at
    ``requests_per_s`` the server tells how long. Where few requests meet, the rest of a response is what it takes
    beside the model. How much of that a sample keeps from others shows in the queue at ``requests_per_s``.

    Raises:
        FulltiltError: the server is gone, or its model was never called.
    """
    assert row.surface is not None
    assert row.policy is not None
    policy, plain = row.policy, row.surface.build_service()
    if SELDOM * requests_per_s * CALIBRATION_S < 1:
        return plain  # requests come so seldom that the loads might have none

    def load(rate: float) -> tuple[NDArray[np.float64], Arrivals]:
        response_s = load_server(url, goal, rate, seconds=CALIBRATION_S).select().response_s
        return np.sort(np.minimum(response_s, CALIBRATION_S)), cut(arrivals, len(response_s))

    before = read_calls(url)
    often_s, often = load(requests_per_s)
    seconds, n_calls, n_samples = read_calls(url) - before
    if not n_calls:
        raise FulltiltError("no request reached the model of the server")
    lengths = [length for request in often.lengths for length in request]
    scale = seconds / n_calls / plain.estimate_s(round(n_samples / n_calls), round(statistics.fmean(lengths)))
    scaled = dataclasses.replace(plain, estimate_s=lambda batch, length: scale * plain.estimate_s(batch, length))
    seldom_s, seldom = load(SELDOM * requests_per_s)

    def build(sample_s: float) -> Service:
        bare = dataclasses.replace(scaled, sample_s=sample_s)
        alone_s = np.sort(simulate_responses_s(seldom, SELDOM * requests_per_s, policy, bare))
        beside_s = np.maximum(seldom_s[: len(alone_s)] - alone_s, 0.0)
        return dataclasses.replace(bare, request_s=beside_s.tolist() or [0.0])

    low_s, high_s = 0.0, 2 / (requests_per_s * goal.samples_per_request)
    for _ in range(N_FITS):
        middle_s = (low_s + high_s) / 2
        responses_s = simulate_responses_s(often, requests_per_s, policy, build(middle_s))
        is_less = compute_quantile_s(responses_s, FITTED) < np.quantile(often_s, FITTED)
        low_s, high_s = (middle_s, high_s) if is_less else (low_s, middle_s)
    return build(low_s)


def read_calls(url: str) -> NDArray[np.float64]:
    """Read from a server's metrics the seconds of the model's calls so far, how many they were, and their samples."""
    try:
        with urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
    except (OSError, HTTPException) as error:
        raise FulltiltError(f"the server was gone under load ({error})") from None
    names = ("model_seconds_sum", "model_seconds_count", "batch_samples_sum")
    return np.array([float(text.partition(f"\nfulltilt_infer_{name} ")[2].partition("\n")[0]) for name in names])
