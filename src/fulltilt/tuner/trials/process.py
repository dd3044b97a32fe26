"""Start a trial process, watch it, end all of it, and say what was seen.

A trial is watched from outside: a deadline, silence after its first steps, the memory of its process tree, its
exit. ``run_trial_process`` never raises for what happens inside a trial; that becomes Evidence.
"""

import contextlib
import dataclasses
import json
import os
import select
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.hardware import MemoryWatchdog, proctree, read_oom_kills
from fulltilt.records import Evidence, Measurement, TrialRequest, decode, encode
from fulltilt.tuner.trials.client import EXIT_PATIENCE_S, Zygote, ZygoteDiedError, open_log

WATCH_INTERVAL_S = 0.25
WATCH_DUTY = 0.03  # share of one core that reading the tree's memory may take from the trial
SILENCE_FLOOR_S = 60.0  # a compile of another batch shape is silent too
SILENCE_FACTOR = 20.0  # times the longest pause between two signs of progress so far
TIMED_KINDS = ("trial", "device")  # in whose process steps are timed
DEADLINE_REMEDY = "a longer --deadline gives a trial more time, up to the whole --budget"
LOG_TAIL_BYTES = 65536  # the stacks of all threads stand behind the last words of a process that was aborted
ANSWER_LIMIT_BYTES = 64 * 2**20  # of one line; most have some kilobytes, a million response times 40 MB
_TORN = b"\0"  # replaces the begin of a line that is too long: the rest of it is then no JSON

OnProgress = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOutcome:
    """All that is known of one trial process after its end."""

    evidence: Evidence
    measurement: Measurement | None
    reply: dict[str, Any]  # the answers that were neither progress nor failure, as sent, joined
    log_path: Path
    seconds: float


def run_trial_process(
    request: TrialRequest, *, zygote: Zygote, log_path: Path, on_progress: OnProgress | None = None
) -> ProcessOutcome:
    """Run one request in a process of its own and wait for its end.

    Nothing of it is left when this returns: processes, shared memory names of torch, temporary files. A
    zygote that dies is started again once; the second time is answered as an error.

    Raises:
        TrainingError: no trial process can be started at all.
        StorageError: the log file cannot be written.
    """
    n_deaths = 0
    while True:
        start = time.monotonic()  # what an attempt before it took is no part of what the trial takes
        zygote.start()
        watch, evidence, seconds = Watch(request, zygote, log_path, on_progress), None, 0.0
        try:
            with contextlib.closing(watch):
                try:
                    watch.fork()
                    while watch.is_alive:
                        watch.wait()
                finally:  # what cleaning up after it takes says nothing of the plan
                    seconds = time.monotonic() - start
        except ZygoteDiedError as error:
            zygote.close()
            n_deaths += 1
            if not watch.is_condemned:  # otherwise it was to be ended anyhow, and the reason stands
                if n_deaths == 1:
                    continue
                evidence = Evidence(message=f"{error}, twice", stderr_tail=_read_tail(log_path))
        return ProcessOutcome(
            evidence=evidence or watch.collect_evidence(),
            measurement=_read_measurement(watch.reply),
            reply=watch.reply,
            log_path=log_path,
            seconds=seconds,
        )


class Watch:
    """Watches one trial process from fork to the end of its last descendant.

    Attributes:
        reply: The answers that were neither progress nor failure, joined.
        pid: The process, which leads a session and a process group.
    """

    def __init__(self, request: TrialRequest, zygote: Zygote, log_path: Path, on_progress: OnProgress | None = None):
        self._request, self._zygote, self._log_path, self._on_progress = request, zygote, log_path, on_progress
        self.reply: dict[str, Any] = {}
        self.is_condemned = False  # it was told to end, mostly for a deadline or a memory limit that it passed
        self._is_asked = False
        self.pid: int | None = None
        self._link: socket.socket | None = None
        self._start_s = 0.0
        self._exit_code: int | None = None
        self._seen_pids: set[int] = set()
        self._buffer = bytearray()
        self._failure: dict[str, Any] = {}
        self._missed: tuple[str, str] | None = None  # a deadline, and the remedy
        self._memory: str | None = None
        self._kill_sent_s = 0.0
        self._progress_s: float | None = None  # last sign of progress once steps run
        self._longest_pause_s = 0.0
        self._part: str | None = None  # of a run, once its steps are measured
        self._scratch: str | None = None
        self._watchdog: _MemoryWatch | None = None
        self._oom_kills_before = read_oom_kills() or 0

    @property
    def is_alive(self) -> bool:
        return self._exit_code is None

    def fork(self) -> None:
        """Have the server fork the process, with one end of a socket for its answers and its orders."""
        request = os.memfd_create("fulltilt-request")
        self._link, theirs = socket.socketpair()
        try:
            with theirs, open_log(self._log_path) as log, os.fdopen(os.dup(request), "wb") as stream:
                stream.write(json.dumps(encode(self._request)).encode())
                stream.flush()
                os.lseek(request, 0, os.SEEK_SET)
                self._scratch = self._zygote.name_scratch()  # here: it may be killed before it has answered
                self._is_asked = True
                self.pid = self._zygote.fork(self._scratch, (request, theirs.fileno(), log.fileno()))
        finally:
            os.close(request)
        self._start_s = time.monotonic()
        if not self._request.rank_devices:
            self._watchdog = _MemoryWatch(self._request, [self.pid])

    def send(self, order: str) -> None:
        """Give an order, for which the deadline begins anew; a process that is dead already takes none."""
        assert self._link is not None
        self._start_s = time.monotonic()
        with contextlib.suppress(ConnectionError):
            self._link.sendall(json.dumps(order).encode() + b"\n")

    def wait(self) -> None:
        """Wait a moment for answers or the end; end a process that missed its deadline or passed its limit."""
        assert self._link is not None
        assert self.pid is not None
        ready = select.select([self._link, self._zygote], [], [], WATCH_INTERVAL_S)[0]
        if self._link in ready and not self._read_answers():
            time.sleep(0.005)  # closed before the exit is reported; the zygote speaks next
        # Each watch of several may read what the server says of another's process.
        self._exit_code = self._zygote.take_exit_code(self.pid)
        if self.is_alive:
            self._check(self.pid, time.monotonic() - self._start_s)
            return
        self._link.setblocking(False)  # a process that left a copy of the socket open cannot hold us up
        with contextlib.suppress(BlockingIOError):
            while self._read_answers():
                pass

    def kill(self) -> None:
        """Have the process killed with all it started, and wait for its end."""
        assert self.pid is not None
        self._condemn(self.pid)
        while self.is_alive:
            self.wait()

    def close(self) -> None:
        """Leave nothing behind, after the end and on the way out of an interrupt."""
        if self._link is not None:
            self._link.close()
        if self._is_asked and self._exit_code is None:
            if self.pid is not None:
                self._seen_pids.update(proctree.kill_session(self.pid))
            self._zygote.close()
        if self.pid is not None:
            proctree.remove_shared_segments({self.pid, *self._seen_pids})
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def collect_evidence(self) -> Evidence:
        """Say what was seen, when all answers are read."""
        where = f", in the part '{self._part}'" if self._part else ""
        names = ("exception_type", "exception_types", "message", "place")
        said = {name: str(self._failure.get(name, "")) for name in names}
        return Evidence(
            has_result=bool(self.reply),
            exit_code=self._exit_code,
            exception_type=said["exception_type"] or None,
            exception_types=tuple(said["exception_types"].split()),
            message=said["message"],
            place=said["place"],
            stderr_tail=_read_tail(self._log_path),
            memory_watchdog=self._memory and f"{self._memory}{where}",
            deadline=self._missed and f"{self._missed[0]}{where}{self._missed[1]}",
            host_oom_kills=max(0, (read_oom_kills() or 0) - self._oom_kills_before),
        )

    def _check(self, pid: int, elapsed_s: float) -> None:
        if self.is_condemned:
            if time.monotonic() - self._kill_sent_s > EXIT_PATIENCE_S:
                raise ZygoteDiedError("the process that trials start from does not answer")
            return
        self._missed = self._find_missed_deadline(elapsed_s)
        if self._watchdog is not None:
            self._memory = self._watchdog.check()
        if self._missed or self._memory:
            self._condemn(pid)

    def _condemn(self, pid: int) -> None:
        self.is_condemned, self._kill_sent_s = True, time.monotonic()
        self._seen_pids.update(proctree.find_members(pid))
        self._zygote.kill(pid)

    def _find_missed_deadline(self, elapsed_s: float) -> tuple[str, str] | None:
        """Return which deadline was missed, and the remedy where there is one."""
        request = self._request
        if elapsed_s > request.deadline_s:
            is_untimed = request.kind in TIMED_KINDS and self._progress_s is None and self._part is None
            timed = ", and no step was timed" if is_untimed else ""
            is_cut = request.deadline_s < request.patience_s  # to what was left of the budget
            remedy = "give a larger --budget" if is_cut else DEADLINE_REMEDY
            said = f"no result after {elapsed_s:.1f} s{timed}, the deadline is {request.deadline_s:.4g} s"
            return said, f"; {remedy}"
        silent_s = 0.0 if self._progress_s is None else time.monotonic() - self._progress_s
        if silent_s > max(SILENCE_FLOOR_S, SILENCE_FACTOR * self._longest_pause_s):
            return f"no step done for {silent_s:.1f} s, the longest pause before was {self._longest_pause_s:.2f} s", ""
        return None

    def _read_answers(self) -> bool:
        assert self._link is not None
        try:
            data = self._link.recv(65536)
        except ConnectionResetError:  # it ended without having read all of its orders
            data = b""
        self._buffer += data
        if b"\n" not in data:
            if len(self._buffer) > ANSWER_LIMIT_BYTES:
                self._buffer = bytearray(_TORN)
            return bool(data)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                continue  # torn, or written by user code by mistake
            if not isinstance(message, dict):
                continue
            if isinstance(message.get("progress"), dict):
                self._note_progress(message["progress"])
            elif isinstance(message.get("failure"), dict):
                self._failure = message["failure"]
            else:
                self.reply |= message
        return bool(data)

    def _note_progress(self, progress: dict[str, Any]) -> None:
        now, stage = time.monotonic(), progress.get("stage")
        if stage == "measuring":
            if self._progress_s is not None:
                self._longest_pause_s = max(self._longest_pause_s, now - self._progress_s)
            self._progress_s = now
        elif stage == "rehearsing":
            self._part, self._progress_s = str(progress.get("part")), None  # no steps to wait for any more
        elif stage == "ranks":
            pids = [int(pid) for pid in progress.get("pids", ())]
            self._seen_pids.update(pids)
            self._watchdog = _MemoryWatch(self._request, pids)
        if self._on_progress is not None:
            self._on_progress(progress)


class _MemoryWatch:
    """Polls the memory of each tree (of the trial's own process, or of each rank), where a limit concerns it."""

    def __init__(self, request: TrialRequest, pids: Sequence[int]):
        limit_bytes = request.memory_limit_bytes if request.device.startswith("cpu") else None
        self._watchdogs = [] if limit_bytes is None else [MemoryWatchdog(pid, limit_bytes) for pid in pids]
        self._next_s = 0.0

    def check(self) -> str | None:
        """Say which tree passed the limit; look no oftener than its share of a core allows."""
        start = time.monotonic()
        if start < self._next_s:
            return None
        for rank, watchdog in enumerate(self._watchdogs):
            if trip := watchdog.check():
                return trip if len(self._watchdogs) == 1 else f"rank {rank}: {trip}"
        end = time.monotonic()
        self._next_s = end + max(WATCH_INTERVAL_S, (end - start) / WATCH_DUTY)
        return None


def _read_measurement(reply: Mapping[str, Any]) -> Measurement | None:
    """Decode the measurement; None without one that can be read."""
    try:
        return decode(Measurement, reply["measurement"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return stream.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
