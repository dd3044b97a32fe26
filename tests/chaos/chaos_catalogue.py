"""Every way of failing that the chaos run knows, with the status it must get: a fault is one line here."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.records import Status

HANG_DEADLINE_S = 1.0
MANY, FEW, RARE = 0, 12, 6


@dataclasses.dataclass(frozen=True, slots=True)
class Fault:
    """One way to end, and what must come of it."""

    name: str  # begins with the status it must get
    act: str  # for ``chaos_bodies.Child.act``, with ``details``
    words: str  # what the reason must hold; the user reads it
    details: Mapping[str, Any]
    n: int  # MANY takes its share of what the others leave; those that cost more say how often
    has_full_log: bool  # the log of the trial lies on a full disk

    @property
    def status(self) -> Status:
        status = self.name.partition(":")[0]
        return "out_of_memory" if status == "oom" else status

    @property
    def hangs(self) -> bool:
        return self.status == "timeout"


RAISED = {
    "oom: cuda": ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 11 GiB"),
    "oom: cuda runtime": ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "oom: cpu": ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    "oom: python": ("MemoryError", ""),
    "oom: numpy": ("_ArrayMemoryError", "Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    "oom: worker": ("RuntimeError", "Caught RuntimeError in DataLoader worker process 0.\nCUDA error: out of memory"),
    "oom: compiler": ("BackendCompilerFailed", "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory."),
    "error: shapes": ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (64x10 and 20x5)"),
    "error: device assert": ("RuntimeError", "CUDA error: device-side assert triggered"),
    "error: nan": ("NonFiniteLossError", "the loss is nan at step 3"),
    "error: interrupt": ("KeyboardInterrupt", ""),
    "error: killed worker": ("RuntimeError", "DataLoader worker (pid 4242) is killed by signal: Killed. "),
}
"""Name → class and message; how every spelling is judged is a table of ``tests/unit/records``."""

CPP = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n"
RUST = "memory allocation of 4294967296 bytes failed\n"
HARMLESS = "ERROR: CUDA error: out of memory; retrying\nTraceback (most recent call last):\nMemoryError"
GARBAGE = [
    "\x00\xff\xfe not JSON\n",
    "42\nnull\n[]\n",
    '{"progress": 7}\n{"failure": "all of it"}\n{"failure": {"exception_types": 7, "message": 7}}\n',
    "[" * 200_000 + "\n",
    '{"measurement": {"samples_per_s": "fast"}}\n',
]
PARTIAL = ['{"measurement": {"phases_ms": {"data_wa']
KILL, TERM, INTERRUPT, STOP = (int(getattr(signal, f"SIG{name}")) for name in ("KILL", "TERM", "INT", "STOP"))


def fault(
    name: str, act: str, words: str = "", /, *, n: int = MANY, has_full_log: bool = False, **details: Any
) -> Fault:
    return Fault(name, act, words, details, n, has_full_log)


def list_faults(folder: Path) -> list[Fault]:
    """The catalogue. ``folder`` is where those that count keep their counts."""
    counter = str(folder / "oom_kills")
    return [
        *(fault(name, "raise_error", (message or type).splitlines()[0].strip(), type=type, message=message)
          for name, (type, message) in RAISED.items()),
        fault("oom: abort, c++", "abort_with", "alloc", words=CPP),
        fault("oom: abort, rust", "abort_with", "alloc", words=RUST),
        fault("oom: real, one block", "ask_for_too_much", "MemoryError"),
        fault("oom: real, to the brim", "fill_memory", "MemoryError"),
        fault("oom: in the cause", "raise_from_memory", "step 3 failed"),
        fault("oom: kernel's killer", "die_of_kernel", "out-of-memory killer", counter=counter),
        fault("oom: killer took a worker", "die_of_kernel", "signal: Killed", counter=counter, is_worker=True),
        fault("oom: /dev/shm is full", "fill_shared_memory", "No space left"),
        fault("oom: and no room for the log", "raise_error", "MemoryError", type="MemoryError", has_full_log=True),
        fault("error: printing with a full disk", "print_and_finish", "No space left", words=HARMLESS,
              has_full_log=True),
        fault("error: raise in a step", "begin, raise_error", "planted", type="ValueError", message="planted"),
        fault("error: without words", "raise_unprintable", "MuteError"),
        fault("error: undecodable name", "raise_with_undecodable_name", "/nowhere/"),
        fault("error: recursion", "recurse", "RecursionError"),
        fault("error: sys.exit(0)", "call_exit", "SystemExit: 0", code=0),
        fault("error: sys.exit(3)", "call_exit", "SystemExit: 3", code=3),
        fault("error: exit 0 unsaid", "leave_at_once", "exit code 0", code=0),
        fault("error: exit 3 unsaid", "leave_at_once", "exit code 3", code=3),
        fault("error: SIGKILL", "send", "SIGKILL", number=KILL),
        fault("error: SIGTERM", "send", "SIGTERM", number=TERM),
        fault("error: SIGABRT", "send", "SIGABRT", number=int(signal.SIGABRT)),
        fault("error: kills its group", "kill_own_group", "SIGKILL"),
        fault("error: SIGSEGV", "segfault", "SIGSEGV"),
        fault("error: SIGBUS", "bus_error", "SIGBUS"),
        fault("error: result, then SIGSEGV", "finish, segfault", "SIGSEGV"),
        fault("error: closes its link", "close_link, finish", "exit code 1"),
        fault("error: garbage only", "write_garbage", "no measurement", lines=GARBAGE, finishes=False),
        fault("error: half an answer", "write_garbage", "no result", lines=PARTIAL, finishes=False),
        fault("error: family, then SIGKILL", "start_family, send", "SIGKILL", number=KILL, n=FEW),
        fault("error: family, then raise", "start_family, raise_error", "RuntimeError", n=FEW),
        fault("error: leave names", "leave_names, send", "SIGKILL", number=KILL, n=FEW),
        fault("error: leave tracked memory", "leave_tracked_memory, send", "SIGKILL", number=KILL, n=FEW),
        fault("error: kills the zygote, twice", "kill_zygote", "twice", n=RARE),
        fault("error: the same with a family", "kill_zygote", "twice", has_family=True, n=RARE),
        fault("timeout: hang", "hang", "deadline", n=FEW),
        fault("timeout: hang ignoring SIGTERM", "hang", "deadline", ignoring=[TERM, INTERRUPT], n=FEW),
        fault("timeout: stopped", "send", "deadline", number=STOP, n=FEW),
        fault("timeout: spin", "spin", "deadline", n=FEW),
        fault("timeout: result, then hang", "finish, hang", "deadline", n=FEW),
        fault("timeout: hang without a link", "close_link, hang", "deadline", n=FEW),
        fault("timeout: hang with a family", "start_family, leave_names, hang", "deadline", n=FEW),
        fault("ok: prints out of memory", "print_and_finish", words=HARMLESS),
        fault("ok: prints, disk is full", "print_buffered_and_finish", words="step 1", has_full_log=True),
        fault("ok: garbage before", "write_garbage", lines=GARBAGE),
        fault("ok: flood before", "flood", n_mib=80, n=RARE),
        fault("ok: leaves a family", "start_family, finish", n=FEW),
        fault("ok: leaves names", "leave_names, finish", n=FEW),
        fault("ok: leaves tracked memory", "leave_tracked_memory, finish", n=FEW),
        fault("ok: killed the zygote once", "kill_zygote", marker=str(folder / "killed"), n=RARE),
    ]  # fmt: skip


def build_schedule(faults: Sequence[Fault], n_trials: int, seed: int) -> list[Fault]:
    """The slow faults as often as they say, the quick ones in turn for the rest; in an order drawn from the seed.

    The first one is a success: a search whose first plans fail by one error ends.
    """
    slow = [fault for fault in faults if fault.n != MANY for _ in range(fault.n)]
    quick = [fault for fault in faults if fault.n == MANY]
    if n_trials < len(slow) + len(quick):
        raise ValueError(f"{n_trials} trials are too few for {len(slow)} of the slow faults and one of each other")
    schedule = slow + [quick[i % len(quick)] for i in range(n_trials - len(slow))]
    random.Random(seed).shuffle(schedule)
    first = next(fault for fault in schedule if fault.n == MANY and fault.status == "ok")
    schedule.remove(first)
    return [first, *schedule]
