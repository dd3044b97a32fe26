"""Explaining a loader's exception: a worker that died, full shared memory, or an error of ours from a worker."""

import os
import re
import signal
from typing import Any

from fulltilt import errors
from fulltilt.data.loading.worker_signals import disarm, list_workers
from fulltilt.errors import DataError, FulltiltError, WorkerDiedError
from fulltilt.records import format_bytes

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "most often the kernel or a memory limit ended it for want of memory: use fewer num_workers, "
    "a smaller prefetch_factor or a smaller batch_size",
    signal.SIGBUS: "shared memory (/dev/shm) is full: enlarge it (docker: --shm-size), or use fewer num_workers or a "
    "smaller prefetch_factor",
    signal.SIGTERM: "something asked it to end: a scheduler, a container that stops, or a person",
}


def explain_loader_error(error: BaseException) -> FulltiltError | None:
    """Translate an exception of a DataLoader, for the caller to raise; None where it means something else.

    A worker's death reaches the main process in two ways: torch raises a RuntimeError from its SIGCHLD handler,
    wherever the main thread is (in the middle of a step, too), or the batch under way breaks off with a
    ConnectionError, FileNotFoundError or EOFError. The handler would raise after the second as well, so it is
    disarmed here.
    """
    iterator = getattr(error, "data_iterator", None)
    text = str(error)
    death, is_broken_off = _DEATH.search(text), isinstance(error, ConnectionError | FileNotFoundError | EOFError)
    if iterator is not None and (death or is_broken_off):
        disarm(iterator)
    if isinstance(error, FulltiltError):
        return _unwrap(error, text)
    if death:
        return _read_death(death, iterator)
    if is_broken_off and iterator is not None:
        return _find_death(iterator)
    if isinstance(error, RuntimeError) and "Too many open files" in text:
        return DataError(
            "the workers ran out of file descriptors; raise the limit (ulimit -n), or use fewer num_workers or a "
            "smaller prefetch_factor"
        )
    return None


def _find_death(iterator: Any, pid: int | None = None) -> WorkerDiedError | None:
    """Describe the death of a worker: of the one with that id, or of the first that ended with an error."""
    for worker in list_workers(iterator):
        if pid is None or worker.pid == pid:
            worker.join(timeout=1)
            if worker.exitcode or (pid and worker.exitcode is not None):
                return _describe_death([worker.pid], worker.exitcode)
    return None


def _read_death(death: re.Match[str], iterator: Any) -> WorkerDiedError:
    pids = [int(pid) for pid in death["pids"].split(",")]
    if death["code"]:
        return _describe_death(pids, int(death["code"]))
    if death["signal"]:
        words = death["signal"].strip()
        # torch names a signal by strsignal's words: SIGKILL is "Killed".
        named = (-s for s in signal.valid_signals() if (signal.strsignal(s) or "").lower() == words.lower())
        return _describe_death(pids, next(named, None), f"killed by a signal ({words})")
    return _find_death(iterator, pids[0]) or _describe_death(pids, None)


def _describe_death(pids: list[int], code: int | None, how: str = "ended without a word") -> WorkerDiedError:
    """Describe it by the exit code, which is negative for a signal, or by ``how`` where none is known."""
    number = max(0, -(code or 0))
    if number:
        how = f"killed by {signal.Signals(number).name if number in iter(signal.Signals) else f'signal {number}'}"
    elif code is not None:
        how = f"ended with exit code {code}"
    room = _read_shm_room() if number == signal.SIGBUS else ""
    remedy = _REMEDIES.get(number, "run with num_workers 0 to see the error where it happens")
    return WorkerDiedError(f"data worker (pid {', '.join(map(str, pids))}) died: {how}; {room}{remedy}")


def _read_shm_room() -> str:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return ""
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"/dev/shm has {format_bytes(free)} of {format_bytes(total)} free; "


def _unwrap(error: FulltiltError, text: str) -> FulltiltError:
    """Restore an error of ours from a worker: torch put the worker's traceback in front of its message."""
    if not text.startswith("Caught "):
        return error
    name = type(error).__name__
    message = text.rpartition(f"{errors.__name__}.{name}: ")[2].strip()
    return type(error)(message) if message and message != text else error
