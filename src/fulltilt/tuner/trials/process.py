"""The parent's side of a trial process: start it, watch it, end all of it, and say what was seen.

A trial is watched from outside: a deadline, silence after its first steps, the memory of its process tree, its
exit. ``run_trial_process`` never raises for what happens inside a trial; that becomes Evidence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.hardware import proctree
from fulltilt.records import Evidence, Measurement, TrialRequest, decode, encode
from fulltilt.tuner.trials.client import EXIT_PATIENCE_S, Zygote, ZygoteDiedError, open_log

WATCH_INTERVAL_S = 0.25
WATCH_DUTY = 0.03  # share of one core that reading the tree's memory may take from the trial
SILENCE_FLOOR_S = 60.0  # a compile of another batch shape is silent too
SILENCE_FACTOR = 20.0  # times the longest pause between two signs of progress so far
TIMED_KINDS = ("trial", "device")  # in whose process steps are timed
DEADLINE_REMEDY = "a longer --deadline gives a trial more time, up to the whole --budget"
LOG_TAIL_BYTES = 65536  # the stacks of all threads stand behind the last words of a process that was aborted
ANSWER_LIMIT_BYTES = 4 * 2**20  # of one line; an answer has some kilobytes
_TORN = b"\0"  # put for the begin of a line that is too long: what follows of it cannot be read as JSON

OnProgress = Callable[[Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOutcome:
    """All that is known of one trial process after its end."""

    evidence: Evidence
    measurement: Measurement | None
    reply: dict[str, Any]  # the answers that were neither progress nor failure, as sent, joined
    traceback: str | None
    log_path: Path
    seconds: float
    stray_pids: tuple[int, ...] = ()  # processes that outlived the trial's own and were ended


def run_trial_process(
    request: TrialRequest,
    *,
    zygote: Zygote,
    log_path: Path,
    kind: str = "trial",
    on_progress: OnProgress | None = None,
) -> ProcessOutcome:
    """Run one request in a process of its own and wait for its end.

    Nothing of it is left when this returns: processes, shared memory names of torch, temporary files. A
    zygote that dies is started again once; the second time is answered as an error.

    Raises:
        TrainingError: no trial process can be started at all.
        StorageError: the log file cannot be written.
    """
    for attempt in (1, 2):
        start = time.monotonic()  # what an attempt before it took is no part of what the trial takes
        zygote.start()
        watch = _Watch(request, zygote, log_path, kind, on_progress)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(watch.clean_up)
                watch.run()
                return watch.build_outcome(time.monotonic() - start)
        except ZygoteDiedError as error:
            zygote.close()
            if watch.is_condemned:  # it was to be ended anyhow, and the reason stands
                return watch.build_outcome(time.monotonic() - start)
            if attempt == 2:
                evidence = Evidence(message=f"{error}, twice", stderr_tail=_read_tail(log_path))
                return watch.build_outcome(time.monotonic() - start, evidence)
    raise AssertionError("unreachable")


class _Watch:
    """One trial process from fork to the end of its last descendant."""

    def __init__(
        self, request: TrialRequest, zygote: Zygote, log_path: Path, kind: str, on_progress: OnProgress | None
    ):
        self._request, self._zygote, self._log_path, self._kind = request, zygote, log_path, kind
        self._on_progress = on_progress
        self._is_asked = False
        self._pid: int | None = None
        self._exit: dict[str, Any] | None = None
        self._seen_pids: set[int] = set()
        self._buffer = b""
        self._reply: dict[str, Any] = {}
        self._failure: dict[str, Any] = {}
        self._deadline: tuple[str, str] | None = None
        self._memory: str | None = None
        self._kill_sent_s: float | None = None
        self._progress_s: float | None = None  # last sign of progress once steps run
        self._longest_pause_s = 0.0
        self._part: str | None = None  # of a run, once its steps are measured
        self._scratch: str | None = None
        self._watchdog = None
        self._oom_kills_before = _read_oom_kills()

    def run(self) -> None:
        answers = self._fork()
        start = time.monotonic()
        try:
            while self._exit is None:
                self._wait(answers)
                self._check(time.monotonic() - start)
            self._drain(answers)
        finally:
            os.close(answers)

    @property
    def is_condemned(self) -> bool:
        """Whether a deadline or a memory limit was passed, so that it was told to end."""
        return self._kill_sent_s is not None

    def build_outcome(self, seconds: float, evidence: Evidence | None = None) -> ProcessOutcome:
        return ProcessOutcome(
            evidence=evidence or self._collect_evidence(),
            measurement=self._read_measurement(),
            reply=self._reply,
            traceback=self._failure.get("traceback"),
            log_path=self._log_path,
            seconds=seconds,
            stray_pids=tuple((self._exit or {}).get("stray_pids", ())),
        )

    def clean_up(self) -> None:
        """After the end, and also on the way out of an interrupt: leave nothing behind."""
        if self._is_asked and self._exit is None:
            if self._pid is not None:
                self._seen_pids.update(proctree.kill_session(self._pid))
            self._zygote.close()
        if self._pid is not None:
            self._seen_pids.update((self._pid, *(self._exit or {}).get("stray_pids", ())))
            proctree.remove_shared_segments(self._seen_pids)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _fork(self) -> int:
        """Have the zygote fork; returns the descriptor to read answers from."""
        message = {**encode(self._request), "kind": self._kind}
        request = os.memfd_create("fulltilt-request")
        reader, writer = os.pipe2(os.O_CLOEXEC)
        try:
            with open_log(self._log_path) as log, os.fdopen(os.dup(request), "wb") as stream:
                stream.write(json.dumps(message).encode())
                stream.flush()
                os.lseek(request, 0, os.SEEK_SET)
                self._scratch = self._zygote.name_scratch()  # here: it may be killed before it has answered
                order = {"do": "fork", "body": self._zygote.body, "scratch": self._scratch}
                self._is_asked = True
                self._zygote.send(order, (request, writer, log.fileno()))
            said = self._zygote.receive(self._zygote.answer_limit_s)
            if said is not None and said["say"] == "refused":
                raise ZygoteDiedError(f"no trial process can be forked: {said['message']}")
            if said is None or said["say"] != "forked":
                raise ZygoteDiedError(f"the process that trials start from did not answer a fork ({said})")
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(request)
            os.close(writer)
        self._pid = said["pid"]
        if not self._request.rank_devices:
            self._watchdog = _build_watchdog(self._request, [said["pid"]])
        return reader

    def _wait(self, answers: int) -> None:
        ready = select.select([answers, self._zygote], [], [], WATCH_INTERVAL_S)[0]
        if answers in ready and not self._read_answers(answers):
            time.sleep(0.005)  # closed before the exit is reported; the zygote speaks next
        if self._zygote in ready:
            said = self._zygote.receive(0)
            if said is not None and said["say"] == "exited" and said["pid"] == self._pid:
                self._exit = said

    def _check(self, elapsed_s: float) -> None:
        if self._exit is not None or self._pid is None:
            return
        if self._kill_sent_s is not None:
            if time.monotonic() - self._kill_sent_s > EXIT_PATIENCE_S:
                raise ZygoteDiedError("the process that trials start from does not answer")
            return
        self._deadline = self._find_missed_deadline(elapsed_s)
        if self._watchdog is not None:
            self._memory = self._watchdog()
        if self._deadline or self._memory:
            self._kill_sent_s = time.monotonic()
            self._seen_pids.update(proctree.find_members(self._pid))
            self._zygote.send({"do": "kill"})

    def _find_missed_deadline(self, elapsed_s: float) -> tuple[str, str] | None:
        """What was missed, and the remedy where there is one."""
        request = self._request
        if elapsed_s > request.deadline_s:
            is_untimed = self._kind in TIMED_KINDS and self._progress_s is None and self._part is None
            timed = ", and no step was timed" if is_untimed else ""
            is_cut = request.deadline_s < request.patience_s  # to what was left of the budget
            remedy = "give a larger --budget" if is_cut else DEADLINE_REMEDY
            return (
                f"no result after {elapsed_s:.1f} s{timed}, the deadline is {request.deadline_s:.4g} s",
                f"; {remedy}",
            )
        if self._progress_s is None:
            return None
        silent_s = time.monotonic() - self._progress_s
        if silent_s > max(SILENCE_FLOOR_S, SILENCE_FACTOR * self._longest_pause_s):
            return f"no step done for {silent_s:.1f} s, the longest pause before was {self._longest_pause_s:.2f} s", ""
        return None

    def _drain(self, answers: int) -> None:
        """What was written before the end; a process that left a copy of the pipe open cannot hold us up."""
        os.set_blocking(answers, False)
        with contextlib.suppress(BlockingIOError):
            while self._read_answers(answers):
                pass

    def _read_answers(self, answers: int) -> bool:
        data = os.read(answers, 65536)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > ANSWER_LIMIT_BYTES:
            self._buffer = _TORN
        for line in lines:
            message = _parse_answer(line)
            if isinstance(message.get("progress"), dict):
                self._note_progress(message["progress"])
            elif isinstance(message.get("failure"), dict):
                self._failure = message["failure"]
            else:
                self._reply |= message
        return bool(data)

    def _note_progress(self, progress: dict[str, Any]) -> None:
        now = time.monotonic()
        if progress.get("stage") == "measuring":
            if self._progress_s is not None:
                self._longest_pause_s = max(self._longest_pause_s, now - self._progress_s)
            self._progress_s = now
        elif progress.get("stage") == "rehearsing":
            self._part, self._progress_s = str(progress.get("part")), None  # no steps to wait for any more
        elif progress.get("stage") == "ranks":
            pids = [int(pid) for pid in progress.get("pids", ())]
            self._seen_pids.update(pids)
            self._watchdog = _build_watchdog(self._request, pids)
        if self._on_progress is not None:
            self._on_progress(progress)

    def _read_measurement(self) -> Measurement | None:
        """None without one, and for one that cannot be read."""
        try:
            return decode(Measurement, self._reply["measurement"])
        except (KeyError, ValueError, TypeError, AttributeError):
            return None

    def _say_where(self, reason: str | None) -> str | None:
        """With the part of the run that was rehearsed then; asked at the end, when all answers are read."""
        return f"{reason}, in the part '{self._part}'" if reason and self._part else reason

    def _collect_evidence(self) -> Evidence:
        missed = self._deadline
        return Evidence(
            has_result=bool(self._reply),
            exit_code=(self._exit or {}).get("exit_code"),
            exception_type=str(self._failure["exception_type"]) if "exception_type" in self._failure else None,
            exception_types=tuple(str(self._failure.get("exception_types", "")).split()),
            message=str(self._failure.get("message", "")),
            stderr_tail=_read_tail(self._log_path),
            memory_watchdog=self._say_where(self._memory),
            deadline=None if missed is None else f"{self._say_where(missed[0])}{missed[1]}",
            host_oom_kills=max(0, _read_oom_kills() - self._oom_kills_before),
        )


def _parse_answer(line: bytes) -> dict[str, Any]:
    """Empty for a torn or foreign line: code of the user's may write to a descriptor that is not its own."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _build_watchdog(request: TrialRequest, pids: Sequence[int]) -> Callable[[], str | None] | None:
    """A poll of each tree's memory (of the trial's own process, or of each rank), where a limit concerns it."""
    if request.memory_limit_bytes is None or not request.device.startswith("cpu"):
        return None
    from fulltilt.hardware import MemoryWatchdog

    watchdogs = [MemoryWatchdog(pid, request.memory_limit_bytes) for pid in pids]
    next_s = 0.0

    def check() -> str | None:
        nonlocal next_s
        start = time.monotonic()
        if start < next_s:
            return None
        for rank, watchdog in enumerate(watchdogs):
            if trip := watchdog.check():
                return trip if len(watchdogs) == 1 else f"rank {rank}: {trip}"
        end = time.monotonic()
        next_s = end + max(WATCH_INTERVAL_S, (end - start) / WATCH_DUTY)
        return None

    return check


def _read_oom_kills() -> int:
    from fulltilt.hardware import read_oom_kills

    return read_oom_kills() or 0


def _read_tail(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return stream.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
