"""One classifier of outcomes, from evidence: exit path first, then the typed exception, then its words.

A message is the weakest evidence, so a child that prints "error" and exits cleanly with a result is fine,
and a run killed by its own memory watchdog is out of memory whatever it printed.
"""

from __future__ import annotations

import dataclasses
import signal

from fulltilt.records.trial import Status

OUT_OF_MEMORY_TYPES = frozenset({"OutOfMemoryError", "MemoryError", "DeviceMemoryError"})

OUT_OF_MEMORY_WORDS = (
    "out of memory",  # CUDA, HIP, MPS ("MPS backend out of memory"), "CUDA error: out of memory"
    "can't allocate memory",  # DefaultCPUAllocator
    "cannot allocate memory",  # ENOMEM from fork, mmap, shm
    "not enough memory",  # DefaultCPUAllocator: not enough memory
    "unable to allocate",  # numpy
    "cublas_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_host_allocation_failed",
    "failed to allocate memory",  # cuFFT, NCCL
    "insufficient shared memory",  # DataLoader: /dev/shm
    "std::bad_alloc",
    "bad_alloc",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that is known of how a process ended."""

    has_result: bool = False
    exit_code: int | None = None  # None while it lives; negative: minus the signal, as subprocess has it
    exception_type: str | None = None  # class name sent by the process itself
    message: str = ""
    stderr_tail: str = ""
    memory_watchdog: str | None = None  # what the watchdog saw when it ended the process
    deadline: str | None = None  # which deadline passed when it was ended
    host_oom_kills: int = 0  # rise of the cgroup's or kernel's oom_kill counter during the process


def classify_outcome(evidence: Evidence) -> tuple[Status, str | None]:
    """Return the status and one line that says why (``None`` when ok)."""
    e = evidence
    if e.memory_watchdog:
        return "out_of_memory", e.memory_watchdog
    if e.deadline:
        return "timeout", e.deadline
    if e.has_result and e.exit_code in (0, None):
        return "ok", None
    if e.exception_type or e.message:
        said = f"{e.exception_type}: {e.message}" if e.exception_type else e.message
        if e.exception_type in OUT_OF_MEMORY_TYPES or _says_out_of_memory(e.message):
            return "out_of_memory", said
        return "error", said
    if e.exit_code == -signal.SIGKILL and e.host_oom_kills > 0:
        return "out_of_memory", "killed by the kernel's out-of-memory killer"
    if e.exit_code is not None and e.exit_code < 0:
        if e.exit_code == -signal.SIGABRT and _says_out_of_memory(e.stderr_tail):
            return "out_of_memory", _last_line(e.stderr_tail)
        return "error", f"ended by {_signal_name(-e.exit_code)}" + _tail(e.stderr_tail)
    if e.exit_code and _says_out_of_memory(e.stderr_tail):
        return "out_of_memory", _last_line(e.stderr_tail)
    return "error", f"ended with exit code {e.exit_code} and no result" + _tail(e.stderr_tail)


def _says_out_of_memory(text: str) -> bool:
    lowered = text.lower()
    return any(word in lowered for word in OUT_OF_MEMORY_WORDS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _tail(text: str) -> str:
    line = _last_line(text)
    return f"; last line on stderr: {line}" if line else ""
