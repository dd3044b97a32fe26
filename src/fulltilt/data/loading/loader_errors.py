"""What a loader's exception means: a worker that died, shared memory that ran out, or our own error from a worker."""

from __future__ import annotations

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
_REMEDY_ELSE = "run with num_workers 0 to see the error where it happens"


def explain_loader_error(error: BaseException) -> FulltiltError | None:
    """The FulltiltError that says what ``error``, raised by a DataLoader, means; None when it means something else.

    The caller raises the answer ``from error``. A worker's death reaches the main process in more than one way: torch
    raises a RuntimeError from its SIGCHLD handler, wherever the main thread happens to be (in the middle of a step,
    too), or the batch that was on its way breaks off with a ConnectionError, FileNotFoundError or EOFError. After the
    second, the handler's error is still to come; for the loader that ``error`` came from it is taken off here.
    """
    iterator = getattr(error, "data_iterator", None)  # torch's messages say less than its workers do
    if iterator is not None and _is_death(error):
        disarm(iterator)
    text = str(error)
    if isinstance(error, FulltiltError):
        return _unwrap(error, text)
    death = _DEATH.search(text)
    if death:
        return _read_death(death, iterator)
    if isinstance(error, ConnectionError | FileNotFoundError | EOFError) and iterator is not None:
        return _find_death(iterator)
    if isinstance(error, RuntimeError) and "Too many open files" in text:
        return DataError(
            "the workers ran out of file descriptors; raise the limit (ulimit -n), or use fewer num_workers or a "
            "smaller prefetch_factor"
        )
    return None


def _is_death(error: BaseException) -> bool:
    return isinstance(error, ConnectionError | FileNotFoundError | EOFError) or bool(_DEATH.search(str(error)))


def _find_death(iterator: Any) -> WorkerDiedError | None:
    for worker in list_workers(iterator):
        worker.join(timeout=1)
        if worker.exitcode:
            return _describe_death([worker.pid], *_split_exit_code(worker.exitcode))
    return None


def _read_death(death: re.Match[str], iterator: Any) -> WorkerDiedError:
    pids = [int(pid) for pid in death["pids"].split(",")]
    if death["code"]:
        return _describe_death(pids, None, int(death["code"]))
    if death["signal"]:
        return _describe_death(pids, _find_signal(death["signal"]), None, death["signal"].strip())
    for worker in list_workers(iterator):
        if worker.pid == pids[0]:
            worker.join(timeout=1)
            if worker.exitcode is not None:
                return _describe_death(pids, *_split_exit_code(worker.exitcode))
    return _describe_death(pids, None, None)


def _describe_death(
    pids: list[int], number: int | None, code: int | None, signal_words: str | None = None
) -> WorkerDiedError:
    if number is not None:
        how = f"killed by {_name_signal(number)}"
    elif signal_words:
        how = f"killed by a signal ({signal_words})"
    else:
        how = f"ended with exit code {code}" if code is not None else "ended without a word"
    remedy = _REMEDY_ELSE if number is None else _REMEDIES.get(number, _REMEDY_ELSE)
    if number == signal.SIGBUS:
        remedy = f"{_read_shm_room()}{remedy}"
    return WorkerDiedError(f"data worker (pid {', '.join(map(str, pids))}) died: {how}; {remedy}")


def _split_exit_code(code: int) -> tuple[int | None, int | None]:
    """(signal, None) or (None, exit code): multiprocessing writes a signal as a negative code."""
    return (-code, None) if code < 0 else (None, code)


def _find_signal(words: str) -> int | None:
    """``Killed`` → 9: torch names a signal by strsignal's words."""
    wanted = words.strip().lower()
    return next((s for s in signal.valid_signals() if (signal.strsignal(s) or "").lower() == wanted), None)


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_shm_room() -> str:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return ""
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return f"/dev/shm has {format_bytes(free)} of {format_bytes(total)} free; "


def _unwrap(error: FulltiltError, text: str) -> FulltiltError:
    """An error of ours that crossed from a worker: torch put the worker's traceback in front of its message."""
    if not text.startswith("Caught "):
        return error
    name = type(error).__name__
    message = text.rpartition(f"{errors.__name__}.{name}: ")[2].strip()
    return type(error)(message) if message and message != text else error
