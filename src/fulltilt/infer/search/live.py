"""Hold arms: processes with an artefact opened that take blocks in turns, and stand still in between."""

import contextlib
import dataclasses
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from fulltilt.errors import DeviceMemoryError
from fulltilt.hardware import read_oom_kills
from fulltilt.hardware.proctree import kill_session
from fulltilt.infer.process import build_error
from fulltilt.infer.search.result import Status
from fulltilt.records import Evidence
from fulltilt.stats import Block
from fulltilt.tuner.trials.client import open_log
from fulltilt.tuner.trials.process import LOG_TAIL_BYTES

OPEN_LIMIT_S = 300.0  # what compiles anew takes half a minute
BLOCK_LIMIT_S = 120.0
EXIT_LIMIT_S = 5.0


class ArmFailedError(Exception):
    """Says which arm ended or hung, and why."""

    def __init__(self, name: str, status: Status, reason: str):
        self.name, self.status, self.reason = name, status, reason
        super().__init__(f"{name}: {reason}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArmSpec:
    """What an arm opens, and the variables that its process has."""

    folder: Path
    log_path: Path
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


class LiveArm:
    """Controls the process of one arm; ``order`` is what its next blocks are of.

    Attributes:
        ready: What the process said when it had answered first.
        calls_s: Seconds of single calls, by order.
        memory_gib: The most that was seen.
    """

    def __init__(self, name: str, spec: ArmSpec):
        self.name, self._spec, self.order = name, spec, dict[str, Any]()
        self.ready: dict[str, Any] = {}
        self.calls_s: dict[str, list[float]] = {}
        self.memory_gib = 0.0
        self._failure: dict[str, str] = {}
        self._oom_kills = read_oom_kills() or 0

    def __enter__(self) -> Self:
        """Start the process, wait until it has answered once, and stop it.

        Raises:
            ArmFailedError: it ended first, or took too long.
        """
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fulltilt-"))
            file = Path(scratch) / "request.json"
            file.write_text(json.dumps({"folder": str(self._spec.folder), "parent_pid": os.getpid()}))
            self._link, theirs = socket.socketpair()
            stack.enter_context(self._link)
            self._lines = stack.enter_context(self._link.makefile("rb"))
            log = stack.enter_context(open_log(self._spec.log_path))
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "fulltilt.infer.search.arm", str(file), str(theirs.fileno()), scratch],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env={**os.environ, **self._spec.environment},
                    start_new_session=True,
                )
            stack.callback(self._end)
            self.ready = self._receive(OPEN_LIMIT_S)
            self._signal(signal.SIGSTOP)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run_block(self) -> Block:
        """Have it take a block while all others stand still.

        Raises:
            ArmFailedError: it ended, or took too long.
        """
        self._signal(signal.SIGCONT)
        text = json.dumps(self.order)
        with contextlib.suppress(ConnectionError):  # then there is no answer, and the reason is found there
            self._link.sendall(json.dumps(text).encode() + b"\n")
        said = self._receive(BLOCK_LIMIT_S)["block"]
        self._signal(signal.SIGSTOP)
        self.calls_s.setdefault(text, []).extend(said["calls_s"])
        self.memory_gib = max(self.memory_gib, said["memory_gib"])
        return Block(n_samples=said["n_samples"], seconds=said["seconds"], stalled_s=said["stalled_s"])

    def read_calls_s(self, order: Mapping[str, Any]) -> list[float]:
        return self.calls_s.get(json.dumps(dict(order)), [])

    def _receive(self, limit_s: float) -> dict[str, Any]:
        self._link.settimeout(limit_s)
        try:
            while line := self._lines.readline():
                message = json.loads(line)
                if "failure" not in message:
                    return message
                self._failure = message["failure"]
        except TimeoutError:
            raise ArmFailedError(
                self.name, "timeout", f"no answer in {limit_s:.0f} s (log: {self._spec.log_path})"
            ) from None
        except (ConnectionError, ValueError):
            pass
        raise self._explain()

    def _explain(self) -> ArmFailedError:
        """Say how the process ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_LIMIT_S)
        types = tuple(self._failure.get("exception_types", "").split())
        evidence = Evidence(
            exit_code=self._process.returncode,
            exception_type=self._failure.get("exception_type"),
            exception_types=types,
            message=self._failure.get("message", ""),
            place=self._failure.get("place", ""),
            stderr_tail=self._spec.log_path.read_text(errors="replace")[-LOG_TAIL_BYTES:],
            host_oom_kills=(read_oom_kills() or 0) - self._oom_kills,
        )
        error = build_error(evidence, self._spec.log_path)
        return ArmFailedError(
            self.name, "out_of_memory" if isinstance(error, DeviceMemoryError) else "failed", str(error)
        )

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _end(self) -> None:
        kill_session(self._process.pid)
        self._process.wait()


@contextlib.contextmanager
def open_arms(specs: Mapping[str, ArmSpec]) -> Iterator[dict[str, LiveArm]]:
    """Start an arm for each, one by one in random order: those that are there already stand still meanwhile.

    Raises:
        ArmFailedError: one ended; the others are ended with it.
    """
    with contextlib.ExitStack() as stack:
        names = random.sample([*specs], len(specs))
        arms = {name: stack.enter_context(LiveArm(name, specs[name])) for name in names}
        yield {name: arms[name] for name in specs}
