"""What the server of an artefact costs a request, beside a plain FastAPI endpoint and LitServe.

And how much of the capacity that the simulation of its queue finds it keeps, and what an answer from the cache takes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks._rounds import build_arms, compute_differences, compute_ratios, run_rounds
from benchmarks._runner import ROOT, Context, Findings, prepare_peers_environment
from benchmarks._schema import Arm, Target, build_arm, judge, judge_median
from fulltilt.hardware.proctree import kill_session
from fulltilt.infer.load.http import HttpLoad
from fulltilt.infer.load.outcome import LoadPlan
from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.policies import Goal, estimate_capacity
from fulltilt.infer.search.simulate import Service, draw_arrivals
from fulltilt.infer.serve.cache import Cache
from fulltilt.infer.serve.disk import Disk

CLAIM = (
    "A request takes at most half as long again as at a plain FastAPI endpoint, and less than at LitServe; p99 keeps "
    "its limit at 85 % of the capacity that the simulation finds; an answer from the cache takes at most 50 µs."
)
NEEDS_PEERS = False  # only LitServe runs in the peers' environment, in a process of its own
DEVICES = ("cpu",)

OURS, FASTAPI, LITSERVE = "fulltilt", "FastAPI", "LitServe"
WAYS = {OURS: "ours", FASTAPI: "fastapi", LITSERVE: "litserve"}
NOTES = {
    OURS: "defaults: cache, line, metrics; every request has another input, so the model is asked",
    FASTAPI: "a function with a pydantic body, run in a thread by uvicorn; no queue, no batches",
    LITSERVE: "LitServer(workers_per_device=1), in the peers' environment with uvloop and httptools",
}
N_ROUNDS, N_REQUESTS = 15, 300  # of a block
REPLICATION = "round of two blocks an arm, one request after the other"
MODELS = {  # name → milliseconds a batch, milliseconds a sample, limit of p99 in ms
    "6 ms a sample": (0.0, 6.0, 50.0),
    "20 ms a batch and 2 ms a sample": (20.0, 2.0, 150.0),
}
SHARE = 0.85
LOAD_S = 160.0  # in shorter ones too few responses are independent for an upper end of p99
POLICY = Policy(max_batch=16)
START_S = 60.0
N_KEPT, N_ELEMENTS = 2000, 128


def run(context: Context) -> Findings:
    arms, targets = measure_overhead(quick=context.quick)
    for name, (batch_ms, sample_ms, limit_ms) in MODELS.items():
        targets += measure_capacity(name, batch_ms, sample_ms, limit_ms, seconds=3.0 if context.quick else LOAD_S)
    kept_arms, kept_targets = measure_cache(n=200 if context.quick else N_KEPT)
    notes = (
        "overhead: three servers live at the same time, one client asks one of them at a time on a connection that it "
        "keeps; the model answers zeros",
        "capacity: the model sleeps, so the cores are the server's and the load generator's; an open loop with Poisson "
        "arrivals at 85 % of the simulated capacity, response from the scheduled arrival",
        f"cache: key and lookup of {N_ELEMENTS} float32 in one process; from disk: with no memory in front of it",
    )
    return Findings(arms=(*arms, *kept_arms), targets=(*targets, *kept_targets), notes=notes)


def measure_overhead(*, quick: bool) -> tuple[list[Arm], list[Target]]:
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        lines = {name: stack.enter_context(open_line(way, "noop")) for name, way in WAYS.items()}

        def run_block(name: str) -> float:
            return statistics.median(ask(lines[name], next(numbers)) for _ in range(20 if quick else N_REQUESTS))

        for name in lines:
            run_block(name)
        rounds = run_rounds(list(lines), run_block, n_rounds=2 if quick else N_ROUNDS)
    arms = build_arms(
        rounds, lambda ms: ms, notes=NOTES, case="no-op model", metric="p50_ms", unit_of_replication=REPLICATION
    )
    targets = [
        judge_median("p50 over that of plain FastAPI", compute_ratios(rounds, OURS, FASTAPI), at_most=1.5),
        judge_median("p50 over that of LitServe", compute_ratios(rounds, OURS, LITSERVE), at_most=1.0),
        judge_median("p50 beyond that of plain FastAPI, ms", compute_differences(rounds, OURS, FASTAPI), at_most=1.0),
    ]
    return arms, targets


def measure_capacity(name: str, batch_ms: float, sample_ms: float, limit_ms: float, *, seconds: float) -> list[Target]:
    """Load the server with a share of what the simulation says that it can take."""
    service = Service(estimate_s=lambda n_samples, length: (batch_ms + sample_ms * n_samples) / 1000)
    most_per_s = POLICY.max_batch / service.estimate_s(POLICY.max_batch, 1)
    goal = Goal(quantile=0.99, limit_s=limit_ms / 1000)
    capacity = estimate_capacity(draw_arrivals([1], 1), POLICY, service, goal, 1.2 * most_per_s)
    bodies = [json.dumps({"inputs": [[float(n)] * 16]}) for n in range(256)]
    with start_server("ours", f"{batch_ms},{sample_ms}") as port:
        plan = LoadPlan(url=f"http://127.0.0.1:{port}", requests_per_s=SHARE * capacity, seconds=seconds)
        outcome = HttpLoad(plan, bodies).run()
    p99 = outcome.response_ms["p99"]
    note = f"simulated capacity {capacity:.0f} requests/s, loaded with {SHARE * capacity:.0f}"
    note += f"; {outcome.unanswered}" if outcome.unanswered else ""
    return [judge(f"p99 at 85 % of capacity, {name}, ms", p99.measured, p99.ci95, at_most=limit_ms, note=note)]


def measure_cache(*, n: int) -> tuple[list[Arm], list[Target]]:
    samples = [(np.full(N_ELEMENTS, k, np.float32),) for k in range(n)]
    with tempfile.TemporaryDirectory() as folder:
        kept = []
        for memory_bytes in (1 << 26, 0):
            disk = Disk(Path(folder) / str(memory_bytes), most_bytes=1 << 26, say=print)
            cache = Cache(artefact="a", memory_bytes=memory_bytes, expiry_s=3600.0, disk=disk)
            for sample in samples:
                cache.put(cache.build_key(sample), (np.zeros(16, np.float32),))
                time.sleep(0.0002)  # the writer keeps up
            time.sleep(0.5)
            kept.append([time_hit_us(cache, sample) for sample in samples])
            cache.close()
    case = f"{N_ELEMENTS} float32"
    arms = [
        build_arm(times, case=case, arm=arm, metric="hit_us", unit_of_replication="answer")
        for arm, times in zip(("memory", "disk"), kept, strict=True)
    ]
    return arms, [judge_median(f"an answer from {arm.arm}, µs", arm.samples, at_most=50.0) for arm in arms]


def time_hit_us(cache: Cache, sample: tuple[np.ndarray, ...]) -> float:
    began_s = time.perf_counter()
    found = cache.get(cache.build_key(sample))
    seconds = time.perf_counter() - began_s
    assert found is not None
    return 1e6 * seconds


@contextlib.contextmanager
def start_server(way: str, model: str) -> Iterator[int]:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    python = prepare_peers_environment() if way == "litserve" else sys.executable
    words = [python, ROOT / "benchmarks" / "_infer_servers.py", way, str(port), model]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until_s = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError(f"{process.args} did not start")
            time.sleep(0.1)
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        kill_session(process.pid)  # LitServe's workers outlive it
        process.wait()


@contextlib.contextmanager
def open_line(way: str, model: str) -> Iterator[socket.socket]:
    """Start a server and connect to it."""
    with start_server(way, model) as port, socket.create_connection(("127.0.0.1", port)) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield line


def ask(line: socket.socket, number: int) -> float:
    """Ask for one answer on a connection, and return the milliseconds until all of it was there."""
    body = json.dumps({"inputs": [[float(number)] * 16]}).encode()
    head = (
        b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    began_s = time.perf_counter()
    line.sendall(head % len(body) + body)
    answer = b""
    while not _is_whole(answer):
        answer += (piece := line.recv(65536))
        assert piece, "the server hung up"
    seconds = time.perf_counter() - began_s
    assert answer.startswith(b"HTTP/1.1 200"), answer
    return 1000 * seconds


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
    return bool(found) and len(body) >= int(length)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as line:
            line.settimeout(5)
            ask(line, -1)
    except (OSError, AssertionError):
        return False
    return True
