"""Serve an artefact by the real command, load it over HTTP from another process, and take the test's verdict."""

import contextlib
import dataclasses
import functools
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.hardware.proctree import set_death_signal
from fulltilt.infer.load.http import PATIENCE_S, HttpLoad, build_bodies, fetch
from fulltilt.infer.load.outcome import MIN_S, LoadPlan
from fulltilt.infer.search.journal import OverError
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate, Live
from fulltilt.infer.search.simulate import Arrivals, Service, compute_quantile_s, simulate_responses_s

READY_LIMIT_S = 120.0
LOAD_S = 45.0  # at most: the test may not decide
WAIT = 0.5  # for the last answers: of the time in which requests are sent
CALIBRATION_S = 4.0  # of each of two loads
SELDOM = 0.2  # of the load, at which few requests meet
N_FITS, FITTED = 12, 0.75  # that quantile: queues hardly show below it, and above it other work of the machine does


def accept(row: Candidate, artefact: Path, goal: Goal, arrivals: Arrivals, logs: Path, limit_s: float) -> Live:
    """Serve a candidate with its policy and load it as the targets say → what the sequential test decided.

    Raises:
        OverError: it was not decided in ``limit_s``, which is less than a load may take.
    """
    from fulltilt.infer.artefact import read_manifest, write_manifest

    assert row.policy is not None
    assert goal.requests_per_s is not None
    assert goal.limit_s is not None
    end_s, rate = time.monotonic() + limit_s, goal.requests_per_s
    load = {"requests_per_s": rate, "samples_per_request": goal.samples_per_request}
    told = Live(verdict="not proven", quantile=goal.quantile, limit_s=goal.limit_s, **load)
    try:
        write_manifest(artefact, dataclasses.replace(read_manifest(artefact), policy=row.policy))
        with serve(artefact, logs / "serve.log", limit_s=min(limit_s, READY_LIMIT_S)) as url:
            if notes := fetch(f"{url}/v1/manifest")["notes"]:  # eager answers in its place
                raise FulltiltError("; ".join(notes))
            service = calibrate(url, row, goal, arrivals, rate / 2)
            left_s = end_s - time.monotonic()
            if left_s < (1 + WAIT) * MIN_S:
                raise OverError
            seconds = min(LOAD_S, left_s / (1 + WAIT))
            found = load_server(url, goal, rate, seconds=seconds, limit_s=goal.limit_s).build_outcome()
    except FulltiltError as error:
        if time.monotonic() > end_s:
            raise OverError from None
        return dataclasses.replace(told, why=str(error))
    if found.ended == "schedule" and found.verdict == "not proven" and seconds < LOAD_S:
        raise OverError
    responses_s = simulate_responses_s(arrivals, rate, row.policy, service)
    return dataclasses.replace(
        told,
        verdict=found.verdict or "not proven",
        measured_s=found.response_ms[f"p{100 * goal.quantile:g}".replace(".", "")].measured / 1000,
        predicted_s=compute_quantile_s(responses_s, goal.quantile),
        n_responses=found.n_requests,
        why=found.why,
    )


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
        return np.sort(np.minimum(response_s, CALIBRATION_S)), arrivals.cut(len(response_s))

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


@contextlib.contextmanager
def serve(artefact: Path, log_path: Path, *, limit_s: float = READY_LIMIT_S) -> Iterator[str]:
    """Serve an artefact without a cache, in a process of its own → its address.

    Raises:
        FulltiltError: the server is not ready in ``limit_s``; names its log.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fulltilt-") as scratch, log_path.open("wb") as log:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = str(reserved.getsockname()[1])
        words = ["serve", artefact, "--port", port, "--cache-mib", "0", "--out", scratch]
        server = subprocess.Popen(
            [sys.executable, "-m", "fulltilt", "infer", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=functools.partial(set_death_signal, signal.SIGTERM),
        )
        try:
            url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + limit_s
            while server.poll() is None and time.monotonic() < end_s:
                with contextlib.suppress(UsageError):
                    fetch(f"{url}/readyz")
                    break
                time.sleep(0.1)
            else:
                how = f"ended with exit code {server.returncode}" if server.returncode else "is not ready"
                raise FulltiltError(f"the server {how} (log: {log_path})")
            yield url
        finally:
            server.kill()  # nobody waits for what it has not answered
            server.wait()


def load_server(
    url: str, goal: Goal, requests_per_s: float | None, *, seconds: float, limit_s: float | None = None
) -> HttpLoad:
    """Load a server from another process, with the samples of its artefact → the load, which has ended.

    Args:
        requests_per_s: None: some always wait.
        limit_s: The load ends where it is decided whether the goal's share of the responses keeps it.

    Raises:
        FulltiltError: no request ended.
    """
    plan = LoadPlan(
        url=url,
        scenario="server" if requests_per_s else "offline",
        requests_per_s=requests_per_s,
        seconds=seconds,
        samples_per_request=goal.samples_per_request,
        quantile=goal.quantile,
        limit_s=limit_s,
        timeout_s=max(2 * (limit_s or 0.0), WAIT * seconds),
    )
    bodies = build_bodies(fetch(f"{url}/v1/samples?n=256")["inputs"], goal.samples_per_request)
    load = HttpLoad(plan, bodies)
    load.run()
    return load
