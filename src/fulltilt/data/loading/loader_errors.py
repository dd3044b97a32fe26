"""Explains a DataLoader's exception: a dead worker, full shared memory, too many files, an error of the data set."""

import itertools
import os
import re
import signal
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fulltilt import errors
from fulltilt.config.bad_samples import SKIP_REMEDY, UNREADABLE
from fulltilt.data.loading.worker_signals import BROKEN_OFF, FETCH_FILE, disarm, list_workers
from fulltilt.errors import DataError, FulltiltError, WorkerDiedError
from fulltilt.records import Evidence, classify_outcome, format_bytes

_DEATH = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\) "
    r"(?:is killed by signal: (?P<signal>[^.]+)|exited unexpectedly(?: with exit code (?P<code>\d+))?)"
)
READING = " was being read"
"""End of the note at an error that came up while a sample was read."""
_READ = re.compile(rf"^(.+){READING}$", re.MULTILINE)
_CAUGHT = re.compile(r"Caught (?P<kind>\w+) in DataLoader worker process \d+\.\n")
_PLACE = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_READERS = (FETCH_FILE, str(Path(__file__).with_name("loader.py")))
_REMEDIES: dict[int, str] = {
    signal.SIGKILL: "most often the kernel or a memory limit ended it for want of memory: use fewer num_workers, "
    "a smaller prefetch_factor or a smaller batch_size",
    signal.SIGBUS: "shared memory (/dev/shm) is full: enlarge it (docker: --shm-size), or use fewer num_workers or a "
    "smaller prefetch_factor",
    signal.SIGTERM: "something asked it to end: a scheduler, a container that stops, or a person",
}


def explain_loader_error(error: BaseException) -> FulltiltError | None:
    """Translate an exception of a DataLoader, for the caller to raise; None where it means something else.

    What the data set's own code raised becomes a DataError that names the sample and the line; its traceback stays with
    ``error``. Out of memory stays what it is.

    A worker's death reaches the main process in two ways: torch raises a RuntimeError from its SIGCHLD handler,
    wherever the main thread is (in the middle of a step, too), or the batch under way breaks off with a
    ConnectionError, FileNotFoundError or EOFError. The handler would raise again after either, so it is disarmed:
    here, or where the batch broke off.
    """
    iterator = getattr(error, "data_iterator", None)
    text = str(error)
    death, is_broken_off = _DEATH.search(text), isinstance(error, BROKEN_OFF) and not _CAUGHT.match(text)
    if iterator is not None and death:
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
    return _explain_data_set(error, text)


def _explain_data_set(error: BaseException, text: str) -> DataError | None:
    caught = _CAUGHT.match(text)  # a worker's traceback is in the text, all that comes out of its process
    kind = caught["kind"] if caught else type(error).__name__
    trace = text if caught else "".join(traceback.format_exception(error))
    sample = _READ.search(trace if caught else "\n".join(getattr(error, "__notes__", ())))
    last = trace.rpartition("Traceback (most recent call last):")[2]
    words = re.search(rf"^(?:[\w<>]+\.)*({kind}(?:: .*)?)$", last, re.MULTILINE)
    said = words[1] if words else kind
    is_memory = classify_outcome(Evidence(exception_type=kind, message=said))[0] == "out_of_memory"
    dataset = None if sample or caught else _find_dataset(error)
    if is_memory or not (sample or caught or dataset):
        return None
    places = [f"{file}:{line}" for file, line in _PLACE.findall(last)] or ["no line is known"]
    place = [each for each in places if not errors.is_library(each)] or places
    if sample is None:
        met = f"a batch of {dataset} cannot be read:" if dataset else "a data worker met"
        return DataError(f"{met} {said} ({place[-1]}); mend the data, or the code there")
    remedy = SKIP_REMEDY
    if not isinstance(error, UNREADABLE):
        remedy = f"mend the code there, or raise OSError there where a sample is damaged: {SKIP_REMEDY}"
    return DataError(f"{sample[1]} cannot be read: {said} ({place[-1]}); {remedy}")


def _find_dataset(error: BaseException) -> str | None:
    """Name the dataset of which this process was reading, or joining, a batch as the error came up."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in _READERS and hasattr(frame.f_locals.get("self"), "dataset"):
            dataset = frame.f_locals["self"].dataset
            return type(getattr(dataset, "source", dataset)).__name__
    return None


def _find_death(iterator: Any, pids: Sequence[int] = ()) -> WorkerDiedError | None:
    """Describe the death of workers: of those with these ids, or of all that ended with an error."""
    dead: dict[int, int] = {}  # process id → exit code
    for worker in list_workers(iterator):
        if not pids or worker.pid in pids:
            worker.join(timeout=0 if dead else 1)
            if worker.exitcode or (pids and worker.exitcode is not None):
                dead[worker.pid] = worker.exitcode
    return _describe_death([*dict.fromkeys((*pids, *dead))], list(dead.values())) if dead else None


def _read_death(death: re.Match[str], iterator: Any) -> WorkerDiedError:
    pids = [int(pid) for pid in death["pids"].split(",")]
    if death["code"]:
        return _describe_death(pids, [int(death["code"])])
    if death["signal"]:
        words = death["signal"].strip()
        # torch names a signal by strsignal's words: SIGKILL is "Killed".
        named = (s for s in signal.valid_signals() if (signal.strsignal(s) or "").lower() == words.lower())
        return _describe_death(pids, [-number for number in itertools.islice(named, 1)], words)
    return _find_death(iterator, pids) or _describe_death(pids, [])


def _describe_death(pids: list[int], codes: list[int], signal_words: str = "") -> WorkerDiedError:
    """Describe how workers ended; multiprocessing writes a signal as a negative exit code."""
    unknown = f"killed by a signal ({signal_words})" if signal_words else "ended without a word"
    hows = list(dict.fromkeys(_describe_end(code) for code in codes)) or [unknown]
    number = -codes[0] if codes else 0
    room = _read_shm_room() if number == signal.SIGBUS else ""
    remedy = _REMEDIES.get(number, "run with num_workers 0 to see the error where it happens")
    return WorkerDiedError(f"data worker (pid {', '.join(map(str, pids))}) died: {' and '.join(hows)}; {room}{remedy}")


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"killed by {signal.Signals(-code).name if -code in iter(signal.Signals) else f'signal {-code}'}"


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
