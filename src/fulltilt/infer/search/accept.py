"""Serve an artefact by the real command, load it over HTTP from another process, and take the test's verdict."""

import contextlib
import dataclasses
import functools
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fulltilt.errors import FulltiltError, UsageError
from fulltilt.hardware.proctree import set_death_signal
from fulltilt.infer.load.http import HttpLoad, build_bodies, fetch
from fulltilt.infer.load.outcome import MIN_S, LoadPlan
from fulltilt.infer.search.journal import OverError
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate, Live

READY_LIMIT_S = 120.0
LOAD_S = 45.0  # at most: the test may not decide
WAIT = 0.5  # for the last answers: of the time in which requests are sent


def accept(row: Candidate, artefact: Path, goal: Goal, logs: Path, limit_s: float) -> Live:
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
    return dataclasses.replace(
        told,
        verdict=found.verdict or "not proven",
        measured_s=found.response_ms[f"p{100 * goal.quantile:g}".replace(".", "")].measured / 1000,
        n_responses=found.n_requests,
        why=found.why,
    )


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
        FulltiltError: no request ended. UsageError: the server does not take one.
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
    fetch(plan.target, body=bodies[0], patience_s=plan.timeout_s)  # says what the server does not take
    load.run()
    return load
