"""Measure whether a stall shows in the percentiles of an open loop, and of a closed one beside it.

The server stands still for a second in the middle of a minute (``benchmarks/_stalling_server.py``). The open loop sends
100 requests a second whatever it does; the closed loop, as many load generators are, sends the next request when the
one before is answered and measures from the sending.
"""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
from collections.abc import Iterator

from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, build_arm, judge
from fulltilt.infer.load.http import HttpLoad
from fulltilt.infer.load.outcome import LoadOutcome, LoadPlan

CLAIM = (
    "A stall of 1 s at 100 requests/s over 60 s shows as a p99 of at least 300 ms; a closed loop shows less than 30 ms."
)
NEEDS_PEERS = False
DEVICES = ("cpu",)

RATE_PER_S, SECONDS, N_REPEATS = 100.0, 60.0, 3
SERVICE_S = 0.003
OPEN, CLOSED = "open loop", "closed loop"
UNIT = "load of a fresh server"


def run(context: Context) -> Findings:
    seconds = 6.0 if context.quick else SECONDS
    found: dict[str, list[LoadOutcome]] = {OPEN: [], CLOSED: []}
    for number in range(context.n_repeats or (1 if context.quick else N_REPEATS)):
        for arm, outcomes in found.items():
            with start_server(seconds / 2) as url:
                outcomes.append(load_server(url, arm, seconds, seed=number))
            p99_ms = outcomes[-1].response_ms["p99"].measured
            print(f"{number + 1}: {arm}: p99 {p99_ms:.1f} ms", file=sys.stderr, flush=True)
    arms = [arm for name, outcomes in found.items() for arm in describe_outcomes(name, outcomes)]
    p99_ms = {name: [outcome.response_ms["p99"].measured for outcome in outcomes] for name, outcomes in found.items()}
    targets = (
        judge("open loop: least p99 of the repeats, ms", min(p99_ms[OPEN]), None, at_least=300),
        judge("closed loop: largest p99 of the repeats, ms", max(p99_ms[CLOSED]), None, at_most=30),
    )
    note = f"the server answers one request after the other, each in {1000 * SERVICE_S:g} ms, from its own process"
    return Findings(arms=tuple(arms), targets=targets, notes=(note,))


@contextlib.contextmanager
def start_server(stall_at_s: float) -> Iterator[str]:
    """Start a server of its own and yield its URL."""
    words = [sys.executable, "-m", "benchmarks._stalling_server", str(SERVICE_S), str(stall_at_s)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def load_server(url: str, arm: str, seconds: float, *, seed: int) -> LoadOutcome:
    scenario, rate_per_s = ("server", RATE_PER_S) if arm == OPEN else ("single", None)
    plan = LoadPlan(url=url, scenario=scenario, requests_per_s=rate_per_s, seconds=seconds, seed=seed)
    return HttpLoad(plan, ['{"inputs":[[0]]}']).run()


def describe_outcomes(arm: str, outcomes: list[LoadOutcome]) -> Iterator[Arm]:
    shared = {"case": "a stall of 1 s", "arm": arm, "unit_of_replication": UNIT}
    figures = {f"response_{q}_ms": [o.response_ms[q].measured for o in outcomes] for q in ("p50", "p99", "max")}
    figures["requests"] = [float(outcome.n_requests) for outcome in outcomes]
    figures["generator_late_p99_ms"] = [outcome.generator_late_ms["p99"] for outcome in outcomes]
    for metric, values in figures.items():
        if all(map(math.isfinite, values)):
            yield build_arm(values, metric=metric, **shared)
