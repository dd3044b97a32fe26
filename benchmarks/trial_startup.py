"""How long a trial takes to start: through the product's zygote, and by the other ways Python offers.

Each way starts a trial process on one request, timed from the asking to the trial's own answers: "configured" when it
has read its request, "built" when model, data and optimizer stand, "measuring" when its first steps are done. It is
ended then.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks import _rounds
from benchmarks._rounds import compute_ratios, run_rounds
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import build_arm, judge
from fulltilt.config import load_config, plan_of
from fulltilt.records import TrialRequest, dumps
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.process import Watch, Zygote
from fulltilt.tuner.trials.server import PRELOAD

CLAIM = "A trial forked from the running zygote starts at least 10 times sooner than one in a fresh Python."
NEEDS_PEERS = False
DEVICES = ("cpu",)

OURS, FRESH = "zygote, running", "fresh python"
STAGES = {
    "configured": "request read (first sign of life)",
    "built": "model, data and optimizer built",
    "measuring": "first steps done",
}

WORKLOAD = "configs/digits.yaml"
LIMIT_RATIO = 10.0

Startup = Mapping[str, float]
"""Seconds from the asking to each answer of one trial, by stage."""


def run(context: Context) -> Findings:
    request = build_request()
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder, Zygote(Path(folder) / "warm.log") as zygote:
        ways = list_ways(request, zygote, Path(folder))
        for start in ways.values():
            start()  # reads files from the disk, starts the zygote and the forkserver
        rounds = run_rounds(list(ways), lambda name: ways[name](), n_rounds=1 if context.quick else 8)
    unit = "round of two processes a way, the ways interleaved"
    arms = [
        arm
        for stage, case in STAGES.items()
        for arm in _rounds.build_arms(
            rounds, lambda found, stage=stage: found[stage], case=case, metric="seconds", unit_of_replication=unit
        )
    ]
    ratios = compute_ratios(rounds, FRESH, OURS, lambda found: found["configured"])
    ratio = build_arm(ratios, case="first sign of life", arm=FRESH, metric="ratio", unit_of_replication="round")
    target = judge(f"{FRESH} over {OURS}, first sign of life", ratio.median, ratio.ci95, at_least=LIMIT_RATIO)
    notes = (
        f"the request is the default plan of {WORKLOAD} on the CPU; a trial is ended after its first steps",
        "'zygote, first trial' includes the start of the zygote, which a search pays once",
        "the forkserver has loaded the modules that the zygote has; spawn and fresh python load all of them",
    )
    return Findings(arms=(*arms, ratio), targets=(target,), notes=notes)


def build_request() -> TrialRequest:
    """Ask for the plan of the configuration itself, as a search would."""
    target = resolve_target(load_config(ROOT / WORKLOAD))
    return TrialRequest(id="startup", source=target.source, plan=plan_of(target.config), device="cpu", n_steps=10)


def list_ways(request: TrialRequest, zygote: Zygote, folder: Path) -> dict[str, Callable[[], Startup]]:
    """Return every way by name; all but the first two keep nothing between two trials, or keep it throughout."""

    def start_cold() -> Startup:
        with Zygote(folder / "cold.log") as cold:
            return start_with_zygote(request, cold, folder / "trial.log")

    return {
        OURS: lambda: start_with_zygote(request, zygote, folder / "trial.log"),
        "zygote, first trial": start_cold,
        "multiprocessing forkserver": lambda: start_with_multiprocessing(request, "forkserver"),
        "multiprocessing spawn": lambda: start_with_multiprocessing(request, "spawn"),
        FRESH: lambda: start_fresh_python(request, folder),
    }


def start_with_zygote(request: TrialRequest, zygote: Zygote, log_path: Path) -> Startup:
    """Start a trial as the product does; a zygote that is not running yet is started, and that counts."""
    stopwatch = Stopwatch()

    def take(progress: Mapping[str, Any]) -> None:
        if stopwatch.take({"progress": progress}):
            assert watch.pid is not None
            zygote.kill(watch.pid)

    zygote.start()
    with contextlib.closing(Watch(request, zygote, log_path, take)) as watch:
        watch.fork()
        while watch.is_alive:
            watch.wait()
    evidence = watch.collect_evidence()
    return stopwatch.read(f"{evidence.message} {evidence.stderr_tail}")


def start_fresh_python(request: TrialRequest, folder: Path) -> Startup:
    """Start the same code in an interpreter of its own; killed, it leaves its temporary files in ``folder``."""
    watch = Stopwatch()
    process = subprocess.Popen(
        [sys.executable, "-m", "fulltilt.tuner.trials.trial"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdin.write(dumps(request).encode())
        process.stdin.close()
        any(watch.take(json.loads(line)) for line in process.stdout)
        process.kill()
        said = process.stderr.read().decode(errors="replace")
    return watch.read(said)


def start_with_multiprocessing(request: TrialRequest, method: str) -> Startup:
    """Start a trial with ``spawn``, or with a ``forkserver`` that has loaded what our zygote has."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([*PRELOAD, __name__])
    watch = Stopwatch()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(dumps(request), writer))
    process.start()
    writer.close()
    any(watch.take(json.loads(message)) for message in _read_messages(reader))
    process.kill()
    process.join()
    return watch.read(f"exit code {process.exitcode}")


def serve(request: str, writer: Connection) -> None:
    """Run the body of a trial in the child of ``multiprocessing``, answers into the pipe."""
    from fulltilt.tuner.trials.kinds import run_request

    run_request(json.loads(request), lambda message: writer.send_bytes(json.dumps(message).encode()))


def _read_messages(reader: Connection) -> Iterable[bytes]:
    while True:
        try:
            yield reader.recv_bytes()
        except EOFError:
            return


class Stopwatch:
    """Notes when each stage was first told, from its own making on."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._seen_s: dict[str, float] = {}

    def take(self, message: Mapping[str, Any]) -> bool:
        """Return True once, when the last stage was told for the first time."""
        stage = message.get("progress", {}).get("stage")
        if stage not in STAGES or stage in self._seen_s:
            return False
        self._seen_s[stage] = time.perf_counter() - self._start_s
        return stage == "measuring"

    def read(self, said: str) -> Startup:
        """Return the seconds of each stage.

        Raises:
            RuntimeError: the trial ended before one of them; ``said`` is what it had to say.
        """
        if missing := [stage for stage in STAGES if stage not in self._seen_s]:
            raise RuntimeError(f"the trial ended before it was {missing[0]}: {said.strip()[-2000:]}")
        return self._seen_s
