"""Start several processes that train one model, watch them, and end all of them when one is gone.

It does what ``torchrun`` does, and two things more: it finds a rank that hangs (``hangs``), and names the cause of a
run's end (``causes``).
"""

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, Literal

import cloudpickle

from fulltilt import _version
from fulltilt.engine.announce import Announcer
from fulltilt.engine.interrupt import catch_signals
from fulltilt.engine.ranks.causes import Cause, find_cause
from fulltilt.engine.ranks.hangs import Sight, Standstill, advance, is_starting
from fulltilt.engine.ranks.process import N_CELLS, PHASES, Failure, Marks
from fulltilt.errors import UsageError
from fulltilt.hardware import count_usable_cores, is_process_stopped
from fulltilt.records import Noted, RunEnded, RunStarted, StepsDone

POLL_S = 0.1
CAUSE_GRACE_S = 2.0  # after the first rank failed: the cause may be told later than what followed from it
END_GRACE_S = 20.0  # after the last result: a process that does not end by then is ended
HANG_LIMIT_S = 20.0
START_LIMIT_S = 600.0  # of the first step, which compiles and fills the data workers, at its own pace in each process
PAUSE_S = 2.0  # a longer gap between two looks: this process was stopped itself, or a listener took its time
TAIL_BYTES = 2000
PACKAGES = str(Path(_version.__file__).parents[1])
# The parent may have found this package in a way of its own; the child finds it there at the latest.
COMMAND = "import sys; sys.path.append(sys.argv[6]); from fulltilt.engine.ranks.process import main; main()"


@dataclasses.dataclass(kw_only=True)
class _Rank:
    index: int
    device: str
    process: subprocess.Popen[bytes]
    link: Connection
    output: IO[bytes] | None  # of all but the first, which writes where this process does
    outcome: Literal["runs", "done", "failed", "gone"] = "runs"

    @property
    def name(self) -> str:
        return f"rank {self.index} ({self.device}, process {self.process.pid})"

    def describe_failed(self, failure: Failure) -> str:
        """Say which error it raised, and where."""
        if failure.error is not None:
            return f"{self.name}: {failure.message}"
        return f"{self.name} failed: {failure.type_name}: {failure.message} ({failure.where}){self._read_tail()}"

    def describe_died(self, code: int | None) -> str:
        """Say by which exit code or signal it ended."""
        if code is None or code >= 0:
            return f"{self.name} ended with exit code {code} before its work was done{self._read_tail()}"
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        why = ": most often by the kernel, where the machine has no memory left" if -code == signal.SIGKILL else ""
        return f"{self.name} was killed by {name}{why}{self._read_tail()}"

    def describe_hung(self, sight: Sight, seconds: float, setting: str) -> str:
        """Say how far it came, for how long it has stood still, and what allows more."""
        state = ": it is stopped by a signal" if sight.is_stopped else ""
        return (
            f"{self.name} hangs: for {seconds:.0f} s it has not come further than {PHASES[sight.mark.phase]}, after "
            f"step {sight.mark.step}, while another rank waits for it; {setting} allows more{state}{self._read_tail()}"
        )

    def _read_tail(self) -> str:
        if self.output is None:
            return ""
        end = self.output.seek(0, os.SEEK_END)
        self.output.seek(max(0, end - TAIL_BYTES))
        lines = self.output.read().decode(errors="replace").strip().splitlines()[-5:]
        return f"; its last words: {' | '.join(lines)}" if lines else ""


def run_ranks(
    function: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    devices: Sequence[str],
    announcer: Announcer,
    max_restarts: int = 0,
    restarted_with: Mapping[str, Any] | None = None,
    plan_again: Callable[[Cause], Mapping[str, Any] | None] = lambda cause: None,
    on_start: Callable[[list[int]], None] = lambda pids: None,
    hang_limit_s: float = HANG_LIMIT_S,
    start_limit_s: float = START_LIMIT_S,
    raised_by: tuple[str, str] = ("run.start_timeout_s", "run.hang_timeout_s"),
    environment: Mapping[str, str] | None = None,
    said: str | None = None,
) -> Any:
    """Run ``function(**given)`` in one process a device, and return what the first one returns.

    The processes get the variables that torchrun sets. Ctrl-C and SIGTERM are handed to all as one wish to stop, and
    take their course here once all have ended; a second signal ends them at once. When one fails, dies or hangs, all
    are ended.

    Args:
        function: Pickled, by value where it cannot be imported (a notebook).
        announcer: Gets the events that rank 0 sends by ``Link.send_event``, in this process, and notes of restarts.
        max_restarts: How often all ranks are started anew after a death that may pass.
        restarted_with: Arguments that replace those of ``given`` in a restart.
        plan_again: Asked first after a failure: arguments to start again with, as often as it returns any.
        on_start: Told the process ids, in the order of the ranks, at every start.
        hang_limit_s: How long a rank may stand still while another one is ahead. Counts from each rank's first step.
        start_limit_s: The same before it, where that is more.
        raised_by: What a user sets to allow more at the start, and later.
        environment: Variables that the processes have beside those of this one.
        said: Written to standard error when the first signal comes.

    Raises:
        RankFailedError: one died or raised an error that is not fulltilt's own.
        RankHungError: one hung.
        DeviceMemoryError: one ran out of memory.
        FulltiltError: one raised it.
        UsageError: ``given`` cannot be sent to another process.

    **Cost**: a start of Python and torch for each, about 3 s of a core.
    """
    relay = _Relay(announcer)
    n_restarts = 0
    with catch_signals(said=said) as stop:
        while True:
            limits_s = (max(hang_limit_s, start_limit_s), hang_limit_s)
            attempt = _Attempt(_pickle(function, given), devices, limits_s, raised_by, environment or {})
            try:
                result = attempt.run(relay, stop, on_start)
            except BaseException as error:  # a second Ctrl-C, a bug in a listener: the ranks are ended, the files too
                relay.tell_end(f"failed: {type(error).__name__}")
                raise
            cause = attempt.cause
            if cause is None:
                break
            if not stop and (changed := plan_again(cause)) is not None:
                given = {**given, **changed}
                continue
            if attempt.ended is not None and cause.rank == 0:
                relay(attempt.ended)
            relay.tell_end(f"failed: {cause.text}")
            if n_restarts >= max_restarts or not cause.may_pass or stop:
                raise cause.build_error()
            n_restarts += 1
            given = {**given, **(restarted_with or {})}
            again = f"all ranks start again from the newest checkpoint ({n_restarts} of {max_restarts} restarts)"
            announcer.note(f"{cause.text}; {again}", level="warning")
    if stop:
        relay.tell_end("interrupted")  # where a rank ended to go on in a fresh process, which will not start
    stop.deliver()
    return result


class _Relay:
    """Hands rank 0's events to the listeners of this process."""

    def __init__(self, announcer: Announcer):
        self._announcer = announcer
        self._started: RunStarted | None = None
        self._step = 0
        self._began_s = time.monotonic()
        self._noted: set[str] = set()  # by a start before this one

    def __call__(self, event: Any) -> None:
        if isinstance(event, Noted) and event.level == "note":
            if event.message in self._noted:
                return
            self._noted.add(event.message)
        elif isinstance(event, RunStarted):
            self._started, self._step, self._began_s = event, event.first_step, time.monotonic()
        elif isinstance(event, StepsDone):
            self._step = event.step
        elif isinstance(event, RunEnded):
            self._started = None
        self._announcer.hand_on(event)

    def tell_end(self, reason: str) -> None:
        """End the run for the listeners where rank 0 could not any more: files are closed, a bar is taken down."""
        if self._started is None:
            return
        seconds = time.monotonic() - self._began_s
        fields = {"attempt": self._started.attempt, "time_s": time.time(), "metrics": {}}
        self(RunEnded(reason=reason, step=self._step, seconds=seconds, **fields))


class _Attempt:
    """One start of all ranks, to their end."""

    cause: Cause | None = None  # why there is no result
    ended: RunEnded | None = None  # told by rank 0, until it is known whether all go on
    _result: Any = None

    def __init__(
        self,
        payload: bytes,
        devices: Sequence[str],
        limits_s: Sequence[float],
        raised_by: Sequence[str],
        environment: Mapping[str, str],
    ):
        self._payload, self._devices, self._limits_s, self._raised_by = payload, devices, limits_s, raised_by
        self._environment = environment
        self._ranks: list[_Rank] = []
        self._standstills: list[Standstill] = []
        self._causes: list[Cause] = []

    def run(self, relay: Callable[[Any], None], stop: Any, on_start: Callable[[list[int]], None]) -> Any:
        """Start, watch and end all ranks; return the first one's result."""
        with (
            tempfile.TemporaryFile(prefix="fulltilt-marks-") as memory,
            tempfile.TemporaryFile(prefix="fulltilt-request-") as request,  # a pipe would block where a rank reads late
        ):
            memory.truncate(len(self._devices) * N_CELLS * 8)
            request.write(self._payload)
            request.flush()
            marks = Marks(memory.fileno(), len(self._devices))
            from torch.distributed import TCPStore

            # Held by this process: no port is chosen that another one could take. A store asks nobody for a password,
            # and by itself it listens at every address of the machine.
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
            store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            try:
                for index, device in enumerate(self._devices):
                    self._ranks.append(self._start(index, device, memory.fileno(), request.fileno(), store.port))
                on_start([rank.process.pid for rank in self._ranks])
                self._standstills = [Standstill(0, time.monotonic())] * len(self._ranks)
                self._watch(marks, relay, stop)
            finally:
                self._end_all()
        return self._result

    def _start(self, index: int, device: str, marks: int, request: int, port: int) -> _Rank:
        mine, theirs = Pipe()
        n_ranks = len(self._devices)
        output = tempfile.TemporaryFile(prefix="fulltilt-rank-") if index else None  # noqa: SIM115  (its tail is told)
        numbers = (theirs.fileno(), marks, request, index, n_ranks)
        process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *map(str, numbers), PACKAGES],
            env={**_build_environment(index, n_ranks, port), **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), marks, request),
            start_new_session=True,  # Ctrl-C on the terminal is this process' business
        )
        theirs.close()
        return _Rank(index=index, device=device, process=process, link=mine, output=output)

    def _watch(self, marks: Marks, relay: Callable[[Any], None], stop: Any) -> None:
        """Wait until all have ended well, or one has not and its cause is known."""
        is_stop_sent = False
        looked_s = time.monotonic()
        give_up_s: float | None = None
        while any(rank.outcome == "runs" for rank in self._ranks):
            for link in wait([rank.link for rank in self._ranks if rank.outcome == "runs"], timeout=POLL_S):
                self._receive(next(rank for rank in self._ranks if rank.link is link), relay)
            if stop and not is_stop_sent:
                is_stop_sent = True
                self._tell("stop")
            for rank in self._ranks:
                # What it said before it ended is read first.
                if rank.outcome == "runs" and rank.process.poll() is not None and not rank.link.poll():
                    self._note_exit(rank, rank.process.returncode)
            now_s = time.monotonic()
            if now_s - looked_s > PAUSE_S:
                self._standstills = [standstill._replace(since_s=now_s) for standstill in self._standstills]
            looked_s = now_s
            self._look_for_hanging(marks, now_s)
            if self._causes:
                give_up_s = give_up_s or now_s + CAUSE_GRACE_S
                if now_s >= give_up_s or not all(cause.is_consequence for cause in self._causes):
                    break
        self.cause = find_cause(self._causes)

    def _receive(self, rank: _Rank, relay: Callable[[Any], None]) -> None:
        try:
            kind, value = rank.link.recv()
        except (EOFError, OSError):  # it ends, or has closed what it must not close
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(CAUSE_GRACE_S)
            self._note_exit(rank, rank.process.poll())
            return
        if kind == "event":
            if isinstance(value, RunEnded) and value.reason.startswith("failed"):
                self.ended = value
            else:
                relay(value)
            if not isinstance(value, StepsDone):
                self._tell("taken", rank)
        elif kind == "done":
            rank.outcome = "done"
            self._result = value if rank.index == 0 else self._result
        elif kind == "failed":
            rank.outcome = "failed"
            self._causes.append(Cause(rank=rank.index, kind="failed", text=rank.describe_failed(value), failure=value))

    def _note_exit(self, rank: _Rank, code: int | None) -> None:
        rank.outcome = "gone"
        self._causes.append(Cause(rank=rank.index, kind="died", text=rank.describe_died(code), exit_code=code))

    def _look_for_hanging(self, marks: Marks, now_s: float) -> None:
        sights = [
            Sight(marks.read(rank.index), rank.outcome == "runs" and is_process_stopped(rank.process.pid))
            for rank in self._ranks
        ]
        self._standstills = advance(self._standstills, sights, now_s)
        index = 0 if is_starting(sights) else 1
        limit_s, setting = self._limits_s[index], self._raised_by[index]
        for rank, sight, standstill in zip(self._ranks, sights, self._standstills, strict=True):
            seconds = now_s - standstill.since_s
            if rank.outcome == "runs" and seconds > limit_s:
                text = rank.describe_hung(sight, seconds, setting)
                self._causes.append(Cause(rank=rank.index, kind="hung", text=text))

    def _tell(self, message: str, only: _Rank | None = None) -> None:
        for rank in self._ranks if only is None else [only]:
            with contextlib.suppress(OSError):  # one that is gone already
                rank.link.send(message)

    def _end_all(self) -> None:
        """End all ranks with their data workers; nothing of them is left."""
        is_well = self.cause is None and all(rank.outcome == "done" for rank in self._ranks)
        until_s = time.monotonic() + (END_GRACE_S if is_well else 0.0)
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if is_well:
                    rank.process.wait(max(0.0, until_s - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            rank.link.close()
            if rank.output is not None:
                rank.output.close()


def _pickle(function: Callable[..., Any], given: Mapping[str, Any]) -> bytes:
    try:
        pickled = cloudpickle.dumps((function, dict(given)))
    except Exception as error:  # whatever the objects of a user do when they are pickled
        raise UsageError(
            f"the workload cannot be sent to other processes ({type(error).__name__}: {error}); a run over several "
            "devices needs functions in a module, or a workload that holds no open file, lock or generator"
        ) from error
    return pickle.dumps(([path or str(Path.cwd()) for path in sys.path], pickled))


def _build_environment(index: int, n_ranks: int, port: int) -> dict[str, str]:
    given = dict.fromkeys(("RANK", "LOCAL_RANK"), index) | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), n_ranks)
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given["TORCHELASTIC_USE_AGENT_STORE"] = True  # torch's word for: the store is the parent's
    defaults = {"OMP_NUM_THREADS": str(max(1, count_usable_cores() // n_ranks))}
    if Path("/sys/class/net/lo").exists():
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the machine's name, which some networks do not know
    return {**defaults, **os.environ, **{name: str(value) for name, value in given.items()}}
