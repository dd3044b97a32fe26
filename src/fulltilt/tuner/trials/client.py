"""Start the trial server, the process that trials are forked from; talk to it and end it."""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

from fulltilt.errors import StorageError, TrainingError
from fulltilt.hardware import proctree
from fulltilt.records import format_bytes
from fulltilt.tuner.trials.trial import DEFAULT_BODY

START_LIMIT_S = 600.0  # of a start that goes on: the first import of torch from a slow disk takes minutes
STILL_LIMIT_S = 120.0  # of a start in which nothing is computed or read any more
START_LOOK_S = 1.0  # between two looks at what it does
ANSWER_LIMIT_S = 120.0  # of a fork
EXIT_PATIENCE_S = 15.0
MARK_VARIABLE = "FULLTILT_ZYGOTE"  # tells what came from one zygote, also when it is gone


class ZygoteDiedError(TrainingError):
    """Says that the process that trials are forked from is gone, and its trial with it."""


class Zygote:
    """Controls the process that trials are forked from; ``start`` starts it.

    Its stderr goes to ``log_path``. A trial process calls ``body`` (``module:function``) with (request, answer).
    ``preload`` names the modules it imports in place of its own list, ``environment`` the variables that it and its
    trials have beside those of this process.
    """

    def __init__(
        self,
        log_path: Path,
        *,
        body: str = DEFAULT_BODY,
        preload: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.log_path, self.body, self._preload = log_path, body, preload
        self._environment = dict(environment or {})
        self.start_limit_s = START_LIMIT_S  # how long its start may take while it is at work
        self.answer_limit_s = ANSWER_LIMIT_S  # how long each fork may take
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._mark = secrets.token_hex(8)
        self._scratch_home = ""
        self._exit_codes: dict[int, int] = {}  # of trials that have ended and were not asked about

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def plan_other(self, environment: Mapping[str, str]) -> "Zygote":
        """Plan one that differs in its environment, with a log of its own beside this one's."""
        name = "-".join([self.log_path.stem, *environment.values()]) + self.log_path.suffix
        return Zygote(self.log_path.with_name(name), body=self.body, preload=self._preload, environment=environment)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Start it and wait until it is ready. Cost: the import of torch, once.

        Raises:
            TrainingError: it cannot start, with its own words.
        """
        if self._process is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open_log(self.log_path) as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _bootstrap(), str(theirs.fileno()), *self._preload],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment, MARK_VARIABLE: self._mark},
                start_new_session=True,  # whoever kills our process group leaves it alive, to end its trials
            )
        pid = self._process.pid
        try:
            ready = wait_for_start(
                self.receive, lambda: proctree.read_work(pid), limit_s=self.start_limit_s, still_limit_s=STILL_LIMIT_S
            )
            if ready["say"] != "ready":
                raise ZygoteDiedError(f"{ready['exception_type']}: {ready['message']}")
        except (ZygoteDiedError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                self._process.kill()  # it still imports and holds nothing yet: waiting for its end only takes longer
            self.close()
            raise TrainingError(f"trial processes cannot start: {error} (log: {self.log_path})") from None
        self._scratch_home = ready["scratch_home"]

    def name_scratch(self) -> str:
        """Name a new folder for the temporary files of one trial; the server has to be started."""
        return os.path.join(self._scratch_home, f"fulltilt-{secrets.token_hex(4)}")

    def fork(self, scratch: str, descriptors: tuple[int, ...]) -> int:
        """Have a trial forked, with the descriptors of its request, its link and its log; return its process."""
        self._send({"do": "fork", "body": self.body, "scratch": scratch}, descriptors)
        end_s = time.monotonic() + self.answer_limit_s
        while True:
            said = self.receive(max(0.0, end_s - time.monotonic())) or {"say": "nothing", "message": "no answer"}
            if said["say"] == "forked":
                return said["pid"]
            if said["say"] != "exited":
                raise ZygoteDiedError(f"no trial process can be forked: {said.get('message', said)}")
            self._exit_codes[said["pid"]] = said["exit_code"]

    def kill(self, pid: int) -> None:
        """Have a trial ended with all it started."""
        self._send({"do": "kill", "pid": pid})

    def take_exit_code(self, pid: int) -> int | None:
        """Return how a trial ended, once; None while it runs."""
        while (said := self.receive(0)) is not None:
            if said["say"] == "exited":
                self._exit_codes[said["pid"]] = said["exit_code"]
        return self._exit_codes.pop(pid, None)

    def _send(self, message: Mapping[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        try:
            socket.send_fds(self._get_socket(), [json.dumps(message).encode()], descriptors)
        except ConnectionError:
            raise ZygoteDiedError(self._describe_end()) from None

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; None when there was none in time."""
        if not select.select([self], [], [], timeout_s)[0]:
            return None
        try:
            data = self._get_socket().recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            raise ZygoteDiedError(self._describe_end())
        return json.loads(data)

    def fileno(self) -> int:
        return self._get_socket().fileno()

    def close(self) -> None:
        """End it and every process below it."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(EXIT_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.returncode != 0:  # ended before it could end what left its trial's session
                proctree.kill_marked(f"{MARK_VARIABLE}={self._mark}")
            self._process = None
            self._exit_codes.clear()

    def _get_socket(self) -> socket.socket:
        if self._control is None:
            raise ZygoteDiedError("it is not running")
        return self._control

    def _describe_end(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the process that trials start from {how}"


class Zygotes:
    """Holds a server for each environment that plans want; each starts when it is needed."""

    def __init__(self, first: Zygote):
        self._first = first
        self._others: dict[tuple[tuple[str, str], ...], Zygote] = {}

    def find(self, environment: Mapping[str, str]) -> Zygote:
        """Find the server whose trials have these variables, beside those of this process."""
        if not environment:
            return self._first
        key = tuple(sorted(environment.items()))
        if key not in self._others:
            self._others[key] = self._first.plan_other(environment)
        return self._others[key]

    def close(self) -> None:
        """End them all, and whatever still runs below them."""
        for zygote in (self._first, *self._others.values()):
            zygote.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def wait_for_start(
    receive: Callable[[float], dict[str, Any] | None],
    read_work: Callable[[], proctree.Work | None],
    *,
    limit_s: float,
    still_limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Wait for the first message of a process while it is at work; give up on one that hangs.

    Args:
        receive: The message that came within so many seconds, or None.
        read_work: What the process has done so far; None where that cannot be seen, and it then counts as at work.
        limit_s: How long it may take at all.
        still_limit_s: How long it may go without any work.

    Raises:
        TimeoutError: it took too long; says what was seen of it.
    """
    start_s = moved_s = clock()
    work = read_work()
    while True:
        now_s = clock()
        left_s = min(start_s + limit_s, moved_s + still_limit_s) - now_s
        if left_s <= 0:
            raise TimeoutError(_describe_late_start(now_s - start_s, now_s - moved_s, work, still_limit_s))
        message = receive(min(START_LOOK_S, left_s))
        if message is not None:
            return message
        seen = read_work()
        if seen is None or seen != work:
            work, moved_s = seen, clock()


def _describe_late_start(waited_s: float, still_s: float, work: proctree.Work | None, still_limit_s: float) -> str:
    said = f"no answer in {waited_s:.0f} s"
    if work is None:
        return f"{said}, and what the process does cannot be read from /proc"
    done = f"{work.cpu_s:.1f} s of CPU time, {format_bytes(max(work.called_bytes, work.disk_bytes))} read"
    if still_s >= still_limit_s:
        return f"{said}, and it hangs: nothing computed or read for {still_s:.0f} s, after {done}"
    return f"{said}, though it is at work ({done}): a slow disk is faster the second time, run the same command again"


def _bootstrap() -> str:
    """Return code for ``python -c``; ``-m`` would need the package on the path, the working folder first."""
    home = str(Path(__file__).resolve().parents[3])
    return (
        f"import sys; home = {home!r}; home in sys.path or sys.path.append(home); "
        "from fulltilt.tuner.trials.server import main; main()"
    )


@contextlib.contextmanager
def open_log(path: Path) -> Iterator[BinaryIO]:
    """Open a fresh log: lines of an earlier attempt must not pass for this one's last words."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("wb")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}); give another place with --out") from error
    with stream:
        yield stream
