"""What two loads of a server tell of it, against simulated servers whose truth is known."""

import math
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from benchmarks import _infer_calibration as calibration

from fulltilt.errors import FulltiltError
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate
from fulltilt.infer.search.simulate import Service, Surface, compute_quantile_s, draw_arrivals, simulate_responses_s
from fulltilt.records import Plan

POINTS = ((1, 1), (1, 2), (2, 1), (2, 2))
ROW = Candidate(name="a", plan=Plan(), policy=Policy(), surface=Surface(points=POINTS, seconds=(0.01,) * 4))


def test_two_loads_of_a_server_tell_what_the_surface_does_not_know(monkeypatch):
    """The server here is a simulated one whose calls wait as long as they take, beside what requests and samples do."""
    waits_s = np.random.default_rng(1).exponential(0.01, 500)
    true = Service(estimate_s=lambda b, n: 0.01, call_s=waits_s, request_s=(0.003, 0.004, 0.02), sample_s=0.005)
    arrivals, calls = draw_arrivals((1,), 1, n=20_000), [np.zeros(3), np.array([0.02 * 80, 80, 80])]

    def load(url, goal, rate, *, seconds):
        simulated_s = simulate_responses_s(calibration.cut(arrivals, round(rate * seconds)), rate, Policy(), true)
        return SimpleNamespace(select=lambda: SimpleNamespace(response_s=np.array(simulated_s)))

    monkeypatch.setattr(calibration, "CALIBRATION_S", 60.0)
    monkeypatch.setattr(calibration, "load_server", load)
    monkeypatch.setattr(calibration, "read_calls", lambda url: calls.pop(0))
    found = calibration.calibrate("", ROW, Goal(), arrivals, 40.0)
    plain = ROW.surface.build_service()
    errors = []
    for rate in (8, 14, 20, 28, 32):
        responses_s = [simulate_responses_s(arrivals, rate, Policy(), service) for service in (true, found, plain)]
        measured_s, predicted_s, before_s = (compute_quantile_s(each, 0.99) for each in responses_s)
        errors.append(abs(predicted_s / measured_s - 1))
        assert abs(before_s / measured_s - 1) > 0.5
    assert np.median(errors) <= 0.15
    assert max(errors) <= 0.3


def test_a_load_of_few_requests_is_not_calibrated_and_a_server_that_is_gone_is_told(monkeypatch):
    arrivals = draw_arrivals((1,), 1)
    assert calibration.calibrate("", ROW, Goal(), arrivals, 1.0).request_s == (0.0,), (
        "one in 7 s: there may be none in 6 s"
    )
    answers = SimpleNamespace(select=lambda: SimpleNamespace(response_s=np.array([math.inf])))
    monkeypatch.setattr(calibration, "load_server", lambda *_, **__: answers)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(FulltiltError, match=r"the server was gone under load \(.*refused"):
        calibration.calibrate(url, ROW, Goal(), arrivals, 20.0)
    calls = np.array([1.0, 9.0, 9.0])
    monkeypatch.setattr(calibration, "read_calls", lambda url: calls)
    with pytest.raises(FulltiltError, match="no request reached the model"):
        calibration.calibrate(url, ROW, Goal(), arrivals, 20.0)
