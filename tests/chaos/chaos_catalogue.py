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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way to end, and what must come of it.

    Attributes:
        act: Method of ``chaos_bodies.Child``, called with ``details``.
        words: What the reason must hold; the user reads it.
        n: MANY takes its share of what the others leave; those that cost more say how often.
        has_full_log: The log of the trial lies on a full disk.
    """

    name: str
    status: Status
    act: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    words: str = ""
    n: int = MANY
    has_full_log: bool = False

    @property
    def hangs(self) -> bool:
        return self.status == "timeout"


OUT_OF_MEMORY = {
    "cuda": (
        "OutOfMemoryError",
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 11 GiB",
    ),
    "cuda runtime": ("AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "cuda driver": ("RuntimeError", "CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY"),
    "cublas": ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "cublas handle": ("RuntimeError", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    "cudnn": ("RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    "cudnn internal": ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    "cufft": ("RuntimeError", "cuFFT error: CUFFT_ALLOC_FAILED"),
    "nccl": ("DistBackendError", "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    "nccl shm": (
        "DistBackendError",
        "Error while creating shared memory segment /dev/shm/nccl-Xyz (size 9637888), error: No space left on device",
    ),
    "hip": ("OutOfMemoryError", "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 24 GiB"),
    "mps": ("RuntimeError", "MPS backend out of memory (MPS allocated: 17.00 GB, max allowed: 18.13 GB)"),
    "xpu": ("OutOfMemoryError", "XPU out of memory. Tried to allocate 1.00 GiB"),
    "cpu": ("RuntimeError", "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you"),
    "cpu windows": ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 4294967296 bytes."),
    "python": ("MemoryError", ""),
    "numpy": ("_ArrayMemoryError", "Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    "enomem": ("OSError", "[Errno 12] Cannot allocate memory"),
    "bad_alloc": ("RuntimeError", "std::bad_alloc"),
    "hdf5": ("OSError", "Can't synchronously read data (memory allocation failed for raw data chunk)"),
    "worker": ("RuntimeError", "Caught RuntimeError in DataLoader worker process 0.\nCUDA error: out of memory"),
    "compiler": ("BackendCompilerFailed", "backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory."),
}
"""Name → class and message, as the libraries spell it."""

ERRORS = {
    "shapes": ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (64x10 and 20x5)"),
    "illegal access": ("AcceleratorError", "CUDA error: an illegal memory access was encountered"),
    "device assert": ("RuntimeError", "CUDA error: device-side assert triggered"),
    "cudnn unsure": ("RuntimeError", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"),
    "kernel too large": ("OutOfResources", "out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    "static tls": ("ImportError", "libgomp.so.1: cannot allocate memory in static TLS block"),
    "word as key": ("KeyError", "out of memory"),
    "memory map": ("ValueError", "row 7 lies out of memory map bounds"),
    "disk": ("OSError", "[Errno 28] No space left on device"),
    "nan": ("NonFiniteLossError", "the loss is nan at step 3"),
    "interrupt": ("KeyboardInterrupt", ""),
    "killed worker": ("RuntimeError", "DataLoader worker (pid 4242) is killed by signal: Killed. "),
}
"""The same for what is no lack of memory, though some of it speaks of memory."""

ABORTS = {
    "c++": "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n",
    "rust": "memory allocation of 4294967296 bytes failed\n",
}
HARMLESS = "ERROR: CUDA error: out of memory; retrying\nTraceback (most recent call last):\nMemoryError"
GARBAGE = [
    "\x00\xff\xfe not JSON\n",
    "42\nnull\n[]\n",
    '{"progress": 7}\n{"failure": "all of it"}\n{"failure": {"exception_types": 7, "message": 7}}\n',
    "[" * 200_000 + "\n",
    '{"measurement": {"samples_per_s": "fast"}}\n',
]
PARTIAL = ['{"measurement": {"phases_ms": {"data_wa']
KILL, TERM, ABORT = int(signal.SIGKILL), int(signal.SIGTERM), int(signal.SIGABRT)


def list_faults(folder: Path) -> list[Fault]:
    """The catalogue. ``folder`` is where those that count keep their counts."""
    counter = str(folder / "oom_kills")
    return [
        *(_raise("out_of_memory", f"oom: {name}", *spec) for name, spec in OUT_OF_MEMORY.items()),
        *(_raise("error", f"error: {name}", *spec) for name, spec in ERRORS.items()),
        *(
            Fault(name=f"oom: abort, {name}", status="out_of_memory", act="abort_with", words="alloc",
                  details={"words": words, "n_threads": 30})
            for name, words in ABORTS.items()
        ),
        Fault(name="oom: real, one block", status="out_of_memory", act="ask_for_too_much", words="MemoryError"),
        Fault(name="oom: real, to the brim", status="out_of_memory", act="fill_memory", words="MemoryError"),
        Fault(name="oom: in the cause", status="out_of_memory", act="raise_from_memory", words="step 3 failed"),
        Fault(name="oom: kernel's killer", status="out_of_memory", act="die_of_kernel", words="out-of-memory killer",
              details={"counter": counter}),
        Fault(name="oom: killer took a worker", status="out_of_memory", act="die_of_kernel", words="signal: Killed",
              details={"counter": counter, "is_worker": True}),
        Fault(name="oom: /dev/shm is full", status="out_of_memory", act="fill_shared_memory", words="No space left"),
        Fault(name="oom: and no room for the log", status="out_of_memory", act="raise_error", words="MemoryError",
              details={"type": "MemoryError"}, has_full_log=True),
        Fault(name="error: printing with a full disk", status="error", act="print_and_finish", words="No space left",
              details={"words": HARMLESS}, has_full_log=True),
        *(
            Fault(name=f"error: raise in {stage}", status="error", act="raise_in_step", details={"stage": stage},
                  words=f"planted in {stage}")
            for stage in ("forward", "backward")
        ),
        Fault(name="error: without words", status="error", act="raise_unprintable", words="MuteError"),
        Fault(name="error: undecodable name", status="error", act="raise_with_undecodable_name", words="/nowhere/"),
        Fault(name="error: recursion", status="error", act="recurse", words="RecursionError"),
        *(
            Fault(name=f"error: sys.exit({code})", status="error", act="call_exit", details={"code": code},
                  words=f"SystemExit: {code}")
            for code in (0, 3)
        ),
        *(
            Fault(name=f"error: exit {code} unsaid", status="error", act="leave_at_once", details={"code": code},
                  words=f"exit code {code}")
            for code in (0, 3)
        ),
        *(
            Fault(name=f"error: {signal.Signals(number).name}", status="error", act="send",
                  details={"number": number}, words=signal.Signals(number).name)
            for number in (KILL, TERM, ABORT)
        ),
        Fault(name="error: kills its group", status="error", act="kill_own_group", words="SIGKILL"),
        Fault(name="error: SIGSEGV", status="error", act="segfault", words="SIGSEGV"),
        Fault(name="error: SIGBUS", status="error", act="bus_error", words="SIGBUS"),
        Fault(name="error: result, then SIGSEGV", status="error", act="finish_then_segfault", words="SIGSEGV"),
        Fault(name="error: closes its pipe", status="error", act="close_pipe_and_finish", words="exit code 1"),
        Fault(name="error: garbage only", status="error", act="write_garbage", details={"lines": GARBAGE, "end": ""},
              words="no measurement"),
        Fault(name="error: half an answer", status="error", act="write_garbage", details={"lines": PARTIAL, "end": ""},
              words="no result"),
        *(
            Fault(name=f"error: family, then {end}", status="error", act="leave_family", words=words, n=FEW,
                  details={"end": end, "number": KILL})
            for end, words in (("send", "SIGKILL"), ("raise", "RuntimeError"))
        ),
        *(
            Fault(name=f"error: {act.replace('_', ' ')}", status="error", act=act, words="SIGKILL", n=FEW,
                  details={"end": "send", "number": KILL})
            for act in ("leave_names", "leave_tracked_memory")
        ),
        Fault(name="error: kills the zygote, twice", status="error", act="kill_zygote", words="twice", n=RARE),
        Fault(name="error: the same with a family", status="error", act="kill_zygote", details={"has_family": True},
              words="twice", n=RARE),
        *(
            Fault(name=f"timeout: {name}", status="timeout", act=act, details=details, words="deadline", n=FEW)
            for name, act, details in (
                ("hang", "hang", {}),
                ("hang ignoring SIGTERM", "hang", {"ignoring": [TERM, int(signal.SIGINT)]}),
                ("stopped", "send", {"number": int(signal.SIGSTOP)}),
                ("spin", "spin", {}),
                ("result, then hang", "finish_then_hang", {}),
                ("hang without a pipe", "hang_without_answers", {}),
                ("hang with a family", "hang_with_family", {}),
            )
        ),
        Fault(name="ok: prints out of memory", status="ok", act="print_and_finish", details={"words": HARMLESS}),
        Fault(name="ok: prints, disk is full", status="ok", act="print_buffered_and_finish",
              details={"words": "step 1"}, has_full_log=True),
        Fault(name="ok: garbage before", status="ok", act="write_garbage", details={"lines": GARBAGE}),
        Fault(name="ok: flood before", status="ok", act="flood", details={"n_mib": 24}, n=RARE),
        Fault(name="ok: leaves a family", status="ok", act="leave_family", details={"end": "finish"}, n=FEW),
        Fault(name="ok: leaves names", status="ok", act="leave_names", details={"end": "finish"}, n=FEW),
        Fault(name="ok: leaves tracked memory", status="ok", act="leave_tracked_memory", details={"end": "finish"},
              n=FEW),
        Fault(name="ok: killed the zygote once", status="ok", act="kill_zygote",
              details={"marker": str(folder / "killed")}, n=RARE),
    ]  # fmt: skip


def build_schedule(faults: Sequence[Fault], n_trials: int, seed: int) -> list[Fault]:
    """The slow faults as often as they say, the quick ones in turn for the rest; in an order drawn from the seed."""
    slow = [fault for fault in faults if fault.n != MANY for _ in range(fault.n)]
    quick = [fault for fault in faults if fault.n == MANY]
    if n_trials < len(slow) + len(quick):
        raise ValueError(f"{n_trials} trials are too few for {len(slow)} of the slow faults and one of each other")
    schedule = slow + [quick[i % len(quick)] for i in range(n_trials - len(slow))]
    random.Random(seed).shuffle(schedule)
    return schedule


def _raise(status: Status, name: str, type: str, message: str) -> Fault:
    first_line = (message or type).strip().splitlines()[0]
    details = {"type": type, "message": message}
    return Fault(name=name, status=status, act="raise_error", details=details, words=first_line)
