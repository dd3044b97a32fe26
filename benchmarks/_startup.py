"""Four ways to start a trial process on the same request, each timed from the asking to the trial's own answers.

A trial answers "configured" when it has read its request, "built" when model, data and optimizer stand, and "measuring"
when its first steps are done. It is ended then.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fulltilt.records import TrialRequest, dumps
from fulltilt.tuner.trials.process import Zygote, run_trial_process
from fulltilt.tuner.trials.server import PRELOAD

STAGES = ("configured", "built", "measuring")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Startup:
    """Seconds from the asking to each answer of one trial."""

    configured_s: float
    built_s: float
    measuring_s: float


def start_with_zygote(request: TrialRequest, zygote: Zygote, log_path: Path) -> Startup:
    """Through the product's own starter; a zygote that is not running yet is started, and that counts."""
    watch = _Stopwatch()

    def take(progress: Mapping[str, Any]) -> None:
        if watch.take({"progress": progress}):
            zygote.send({"do": "kill"})

    outcome = run_trial_process(request, zygote=zygote, log_path=log_path, on_progress=take)
    return watch.read(f"{outcome.evidence.message} {outcome.evidence.stderr_tail}")


def start_fresh_python(request: TrialRequest, folder: Path) -> Startup:
    """``python -m fulltilt.tuner.trials.trial``: the same code in an interpreter of its own.

    Killed, it leaves its temporary files, so they go to ``folder``.
    """
    watch = _Stopwatch()
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
        _take_until_measuring(watch, process.stdout)
        process.kill()
        said = process.stderr.read().decode(errors="replace")
    return watch.read(said)


def start_with_multiprocessing(request: TrialRequest, method: str) -> Startup:
    """``multiprocessing`` with ``spawn``, or with a ``forkserver`` that has loaded what our zygote has."""
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([*PRELOAD, __name__])
    watch = _Stopwatch()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(dumps(request), writer))
    process.start()
    writer.close()
    _take_until_measuring(watch, _read_messages(reader))
    process.kill()
    process.join()
    return watch.read(f"exit code {process.exitcode}")


def serve(request: str, writer: Connection) -> None:
    """In the child of ``multiprocessing``: the body of a trial, answers into the pipe."""
    from fulltilt.tuner.trials.kinds import run_request

    run_request(json.loads(request), lambda message: writer.send_bytes(json.dumps(message).encode()))


class _Stopwatch:
    """Notes when each stage was first told, from its own making on."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._seen_s: dict[str, float] = {}

    def take(self, message: Mapping[str, Any]) -> bool:
        """True once, when the last stage was told for the first time."""
        stage = message.get("progress", {}).get("stage")
        if stage not in STAGES or stage in self._seen_s:
            return False
        self._seen_s[stage] = time.perf_counter() - self._start_s
        return stage == STAGES[-1]

    def read(self, said: str) -> Startup:
        if missing := [stage for stage in STAGES if stage not in self._seen_s]:
            raise RuntimeError(f"the trial ended before it was {missing[0]}: {said.strip()[-2000:]}")
        return Startup(**{f"{stage}_s": self._seen_s[stage] for stage in STAGES})


def _take_until_measuring(watch: _Stopwatch, lines: Iterable[bytes]) -> None:
    for line in lines:
        if watch.take(json.loads(line)):
            return


def _read_messages(reader: Connection) -> Iterable[bytes]:
    while True:
        try:
            yield reader.recv_bytes()
        except EOFError:
            return


def list_ways(request: TrialRequest, zygote: Zygote, folder: Path) -> dict[str, Callable[[], Startup]]:
    """Every way by name; all but the first two keep nothing between two trials, or keep it for the whole benchmark."""

    def start_cold() -> Startup:
        with Zygote(folder / "cold.log") as cold:
            return start_with_zygote(request, cold, folder / "trial.log")

    return {
        "zygote, running": lambda: start_with_zygote(request, zygote, folder / "trial.log"),
        "zygote, first trial": start_cold,
        "multiprocessing forkserver": lambda: start_with_multiprocessing(request, "forkserver"),
        "multiprocessing spawn": lambda: start_with_multiprocessing(request, "spawn"),
        "fresh python": lambda: start_fresh_python(request, folder),
    }
