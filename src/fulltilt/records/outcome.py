"""Classify how a trial process ended: by its exit first, then by its exception, then by its words.

A message is the weakest evidence: a child that prints "error" and exits cleanly with a result is fine, and a run that
the memory watchdog ended is out of memory whatever it printed. Words count only in the message of an exception that
could mean it, and in the last lines of a process that could say no more.
"""

import dataclasses
import re
import signal

from fulltilt.errors import strip_control_codes
from fulltilt.records.trial import Status

OUT_OF_MEMORY_TYPES = frozenset({"OutOfMemoryError", "MemoryError", "DeviceMemoryError"})

HUNG_TYPE = "RankHungError"

OUT_OF_MEMORY_PATTERNS = (
    # CUDA, HIP, MPS, XPU, NCCL, JAX; the driver's CUDA_ERROR_OUT_OF_MEMORY. Not "out of memory map", "out of memory-…"
    r"(?<![a-z])out[ _]of[ _](?:\w+[ _])?memory(?![a-z]|-| map)",
    r"error(?:outofmemory|memoryallocation)|outofmemoryerror:",  # hipErrorOutOfMemory, cudaErrorMemoryAllocation
    # DefaultCPUAllocator, ENOMEM from fork and mmap, onnxruntime. Loading a library with static TLS says so too.
    r"(?:can't|cannot|could not|unable to|failed to) (?:allocate|map) (?:\w+ )?memory(?! in static tls)",
    r"not enough (?!shared)(?:\w+ )?memory|insufficient (?:\w+ )?memory",  # DefaultCPUAllocator, OpenCV; DataLoader
    r"(?:unable|failed) to allocate \d",  # numpy, OpenCV: followed by an amount
    r"memory allocation (?:of \d+ bytes )?failed",  # Rust (tokenizers), HDF5
    # CUBLAS_STATUS_ALLOC_FAILED; cuFFT, cuDNN, cuSOLVER, cuSPARSE, cuRAND; hipBLAS; MIOpen
    r"(?<![a-z])(?:cu|hip|miopen|roc|memory_)\w*alloc(?:ation)?_?failed\b",
    r"cublas_status_not_initialized.*cublascreate",  # its workspace is the first thing it allocates
    r"rocblas_status_memory_error",
    r"\bbad_alloc\b",  # C++
    # oneDNN: scratch memory, or pages for a kernel it compiles. "… a primitive descriptor" is of wrong arguments
    r"could not (?:create|execute) a primitive(?! descriptor)|could not create a memory object",
    r"no space left on device.*(?:/dev/shm|\bshm\b|shared memory)",  # torch, NCCL, multiprocessing: tmpfs is memory
    r"(?:/dev/shm|\bshm\b|shared memory).*no space left on device",
    r"no space left on device: '/(?:psm_|torch_|wnsm_)",  # names given to shm_open come without their folder
)
_OUT_OF_MEMORY = re.compile("|".join(OUT_OF_MEMORY_PATTERNS), re.IGNORECASE | re.DOTALL)

WORDLESS_TYPES = frozenset(
    {"AssertionError", "AttributeError", "ImportError", "IndexError", "KeyError", "ModuleNotFoundError", "NameError"}
    | {"NotImplementedError", "SyntaxError", "TypeError", "UnboundLocalError", "ZeroDivisionError"}
)
"""Errors of the program itself: whatever their words, they are not about memory."""

_KILLED_WORKER = re.compile(r"killed by SIGKILL|killed by signal: Killed")
_TRACEBACK_END = re.compile(rf"^(?:\w+\.)*_?\w*(?:{'|'.join(sorted(OUT_OF_MEMORY_TYPES))})\b")
_DUMP = "Fatal Python error: "  # faulthandler: stacks of all threads follow
_CRASHED_THREAD = re.compile(r"Current thread .*\(most recent call first\):\s+(File .+)")
_LAST_LINES = 4  # "terminate called …" and "what(): …" are two
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
_SIGNAL_HINTS = {signal.SIGBUS: " (a mapped file was cut short, or /dev/shm is full)"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known of how a process ended."""

    has_result: bool = False
    exit_code: int | None = None  # None while it lives; negative: minus the signal, as subprocess has it
    exception_type: str | None = None  # class name sent by the process itself
    exception_types: tuple[str, ...] = ()  # with its base classes, and those of what it was raised from
    message: str = ""
    place: str = ""  # the user's line that raised it, where there is one
    stderr_tail: str = ""
    memory_watchdog: str | None = None  # what the watchdog saw when it ended the process
    deadline: str | None = None  # which deadline passed when it was ended
    host_oom_kills: int = 0  # rise of the cgroup's or kernel's oom_kill counter during the process
    had_run_out: bool = False  # memory had run out before in the work it did: a library that is refused some may crash


def classify_outcome(evidence: Evidence) -> tuple[Status, str | None]:
    """Return the status and one line that says why (``None`` when ok), without control codes for a terminal."""
    status, reason = _classify(evidence)
    return status, None if reason is None else strip_control_codes(reason)


def _classify(e: Evidence) -> tuple[Status, str | None]:
    if e.memory_watchdog:
        return "out_of_memory", e.memory_watchdog
    if e.deadline:
        return "timeout", e.deadline
    if e.has_result and e.exit_code in (0, None):
        return "ok", None
    if e.exception_type == HUNG_TYPE:  # it was ended for that, as by a deadline from outside
        return "timeout", e.message.strip()
    if e.exception_type or e.message.strip():
        is_memory = _is_out_of_memory(e)
        parts = ("" if is_memory else e.place, e.exception_type, e.message.strip())
        return ("out_of_memory" if is_memory else "error"), ": ".join(part for part in parts if part)
    if e.exit_code == -signal.SIGKILL and e.host_oom_kills > 0:
        return "out_of_memory", "killed by the kernel's out-of-memory killer"
    words = _read_last_words(e.stderr_tail)
    if e.exit_code is not None and e.exit_code < 0:
        if e.exit_code == -signal.SIGABRT and _say_out_of_memory(words):
            return "out_of_memory", words[-1]
        said = f"ended by {_name_signal(-e.exit_code)}" + _describe_end(e.stderr_tail, words)
        return ("out_of_memory" if e.had_run_out and -e.exit_code in _CRASHES else "error"), said
    if e.exit_code and _say_out_of_memory(words):
        return "out_of_memory", words[-1]
    return "error", f"ended with exit code {e.exit_code} and no result" + _describe_end(e.stderr_tail, words)


def _is_out_of_memory(e: Evidence) -> bool:
    """Whether the exception that ended the process was about memory: by its class, its worker's end, its words."""
    if OUT_OF_MEMORY_TYPES & {e.exception_type, *e.exception_types}:
        return True
    if e.host_oom_kills > 0 and _KILLED_WORKER.search(e.message):
        return True
    return e.exception_type not in WORDLESS_TYPES and bool(_OUT_OF_MEMORY.search(e.message))


def _say_out_of_memory(lines: list[str]) -> bool:
    return any(_OUT_OF_MEMORY.search(line) for line in lines) or any(_TRACEBACK_END.match(line) for line in lines[-1:])


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name + _SIGNAL_HINTS.get(signal.Signals(number), "")
    except ValueError:
        return f"signal {number}"


def _read_last_words(text: str) -> list[str]:
    """Read the last lines that the process wrote itself, before those of faulthandler."""
    lines = [line.strip() for line in text.partition(_DUMP)[0].splitlines()]
    return [line for line in lines if line][-_LAST_LINES:]


def _describe_end(text: str, words: list[str]) -> str:
    """Say where it died, when faulthandler said so; else its last line."""
    if place := _CRASHED_THREAD.search(text.partition(_DUMP)[2]):
        return f" at {place[1].strip()}"
    return f"; last line on stderr: {words[-1]}" if words else ""
