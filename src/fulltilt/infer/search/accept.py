"""Serve an artefact by the real command, load it over HTTP from another process, and take the test's verdict."""

import contextlib
import dataclasses
import functools
import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulltilt.errors import FulltiltError
from fulltilt.hardware.proctree import run_in_session, set_death_signal
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate, Live
from fulltilt.infer.search.simulate import Arrivals, Service, compute_quantile_s, simulate_responses_s

FULLTILT = (sys.executable, "-m", "fulltilt", "infer")
READY_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0
LOAD_S = 45.0  # at most: the test may not decide
CALIBRATION_S = 3.0
ALONE_PER_S = 0.01  # arrivals so rare that no request meets another


def accept(row: Candidate, artefact: Path, goal: Goal, arrivals: Arrivals, folder: Path) -> Live:
    """Serve a candidate with its policy and load it as the targets say → what the sequential test decided."""
    assert row.policy is not None
    assert goal.requests_per_s is not None
    assert goal.limit_s is not None
    live = Live(
        verdict="not proven",
        requests_per_s=goal.requests_per_s,
        quantile=goal.quantile,
        limit_s=goal.limit_s,
        measured_s=None,
        predicted_s=None,
        n_responses=0,
    )
    try:
        with serve_copy(artefact, row.policy, folder / "serve.log") as url:
            service = calibrate(url, row, goal, arrivals, folder / "load.log")
            said = run_load(url, goal, goal.requests_per_s, seconds=LOAD_S, log_path=folder / "load.log")
    except FulltiltError as error:
        return dataclasses.replace(live, why=str(error))
    measured_ms = said["response_ms"][name_quantile(goal.quantile)]["measured"]
    responses_s = simulate_responses_s(arrivals, goal.requests_per_s, row.policy, service)
    return dataclasses.replace(
        live,
        verdict=said["verdict"],
        measured_s=None if measured_ms is None else measured_ms / 1000,
        predicted_s=compute_quantile_s(responses_s, goal.quantile),
        n_responses=said["n_requests"],
        why=said["why"],
    )


def calibrate(url: str, row: Candidate, goal: Goal, arrivals: Arrivals, log_path: Path) -> Service:
    """Measure what a request takes beside the model, one request at a time, and describe the server with it."""
    assert row.surface is not None
    assert row.policy is not None
    service = row.surface.build_service()
    said = run_load(url, goal, None, seconds=CALIBRATION_S, log_path=log_path)
    alone_s = compute_quantile_s(simulate_responses_s(arrivals, ALONE_PER_S, row.policy, service), 0.5)
    return dataclasses.replace(service, request_s=max(0.0, said["response_ms"]["p50"]["measured"] / 1000 - alone_s))


def name_quantile(quantile: float) -> str:
    return f"p{100 * quantile:g}".replace(".", "")


@contextlib.contextmanager
def serve_copy(artefact: Path, policy: Policy, log_path: Path) -> Iterator[str]:
    """Serve an artefact with a policy, without a cache, in a process of its own → its address.

    Raises:
        FulltiltError: the server does not start; names its log.
    """
    from fulltilt.infer.artefact import read_manifest, write_manifest

    with tempfile.TemporaryDirectory(prefix="fulltilt-") as scratch, socket.socket() as reserved:
        copy = Path(scratch) / "artefact"
        shutil.copytree(artefact, copy)
        write_manifest(copy, dataclasses.replace(read_manifest(copy), policy=policy))
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        reserved.close()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            command = [*FULLTILT, "serve", str(copy), "--port", str(port), "--cache-mib", "0", "--out", scratch]
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=functools.partial(set_death_signal, signal.SIGTERM),
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _await_ready(url, server, log_path)
            yield url
        finally:
            server.terminate()
            try:
                server.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def run_load(
    url: str, goal: Goal, requests_per_s: float | None, *, seconds: float, log_path: Path, has_limit: bool = True
) -> dict[str, Any]:
    """Load a server by ``fulltilt infer load`` → its JSON.

    Args:
        requests_per_s: None: one request at a time, each when the one before is answered.
        has_limit: Whether the responses are held to the goal; the load ends where that is decided.

    Raises:
        FulltiltError: it failed; names its log.
    """
    result = log_path.with_suffix(".json")
    result.unlink(missing_ok=True)
    words = ["--samples-per-request", str(goal.samples_per_request), "--seconds", f"{seconds:g}"]
    if requests_per_s is None:
        words += ["--scenario", "single"]
    else:
        words += ["--requests-per-s", f"{requests_per_s:g}"]
        if has_limit:
            words += ["--percentile", f"{100 * goal.quantile:g}", "--limit-ms", f"{1000 * (goal.limit_s or 0.0):g}"]
    command = [*FULLTILT, "load", url, *words, "--json", str(result), "--quiet"]
    with log_path.open("wb") as log:
        code = run_in_session(command, grace_s=STOP_LIMIT_S, stdout=log, stderr=log)
    if not result.exists():
        raise FulltiltError(f"the load ended with exit code {code} and no result (log: {log_path})")
    return json.loads(result.read_text())


def _await_ready(url: str, server: "subprocess.Popen[bytes]", log_path: Path) -> None:
    end_s = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < end_s and server.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(f"{url}/readyz", timeout=5):
            return
        time.sleep(0.1)
    how = f"ended with exit code {server.returncode}" if server.returncode is not None else "is not ready"
    said = log_path.read_text(errors="replace").strip().splitlines()[-1:]
    raise FulltiltError(f"the server {how}: {''.join(said)} (log: {log_path})")
