"""retain_freed_memory: the C library keeps what tensors free for the next ones, instead of giving it back."""

import ctypes
import functools
import mmap
import os
import re
from collections.abc import Mapping
from pathlib import Path

from fulltilt.errors import PlanObstacleError
from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup

NAME = "retain_freed_memory"

# Parameters of mallopt(3) in <malloc.h>; a threshold of -1 is never reached. USUAL is what glibc has, or comes to.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
RETAINING = {M_TRIM_THRESHOLD: -1, M_MMAP_MAX: 0}
USUAL = {M_TRIM_THRESHOLD: 64 * 2**20, M_MMAP_THRESHOLD: 32 * 2**20, M_MMAP_MAX: 65536}

# Above what the end of a heap keeps by itself (64 MiB); below 32 MiB freeing a mapped block moves glibc's threshold.
PROBE_BYTES = 128 * 2**20
IS_MAPPED = 2  # bit of a block's size, which lies before it: the block is a mapping of its own
OTHER_ALLOCATORS = re.compile(r"/lib(jemalloc|tcmalloc|mimalloc|hoard)[^/]*\.so")


class _Statistics(ctypes.Structure):
    """``struct mallinfo2`` of <malloc.h>, with the free bytes, and those at the end of the heap."""

    _fields_ = [("_before", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


@functools.cache
def find_obstacle() -> str | None:
    """Say why glibc cannot keep this process' memory; None where it can."""
    known = (os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None) or ""
    version = tuple(int(part) for part in re.findall(r"\d+", known)[:2])
    if version < (2, 33):
        return f"it takes glibc 2.33 or newer, and the C library here is {known or 'another one'}; use {NAME} false"
    found = OTHER_ALLOCATORS.search(Path("/proc/self/maps").read_text())
    if found is not None:
        return f"lib{found[1]} is loaded in glibc's place, with rules of its own; use {NAME} false"
    return None


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type != "cpu":
        return f"the tensors of a step lie in the device's memory, which has an allocator of its own; use {NAME} false"
    return find_obstacle()


def _apply(setup: Setup, value: bool) -> None:
    if setup.device.type != "cpu":
        return
    if value:
        _set(RETAINING)
        setup.state[NAME] = True
        if not _observe(setup):
            setup.notes.append(
                f"{NAME}=True has no effect on large blocks: this thread uses another arena, as where "
                "memory ran out before or training runs beside the main thread; begin the training in a process anew"
            )
    elif _observe(setup):
        _set(USUAL)
        ctypes.CDLL(None).malloc_trim(0)  # else large blocks still come from what was kept
        setup.notes.append(
            f"{NAME}=False: this process, or its environment (MALLOC_…_, GLIBC_TUNABLES), had it on; the run "
            f"goes without it, by fixed thresholds; set speed.{NAME} to true to keep it"
        )


def _set(values: Mapping[int, int]) -> None:
    libc = ctypes.CDLL(None)
    refused = [number for number, value in values.items() if not libc.mallopt(number, value)]
    if refused:
        raise PlanObstacleError(
            f"mallopt refused parameter {refused[0]} with the value {values[refused[0]]}; use {NAME} false"
        )


def _observe(setup: Setup) -> bool:
    """Whether a large block comes from memory that the process keeps, and is not mapped by itself.

    The block is larger than any gap and is not touched, so it takes addresses and no memory. Where those are limited
    the answer is what was set: a thread that glibc fails to serve is moved to another arena, for good.
    """
    if setup.device.type != "cpu" or find_obstacle() is not None:
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = _Statistics
    free = libc.mallinfo2()
    n_bytes = PROBE_BYTES + free.fordblks - free.keepcost
    block = libc.malloc(n_bytes) if _has_room(n_bytes) else None
    if block is None:
        return setup.state.get(NAME, False)
    is_mapped = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & IS_MAPPED
    libc.free(block)
    return not is_mapped


def _has_room(n_bytes: int) -> bool:
    """Whether the system would map a block, asked without glibc."""
    try:
        mmap.mmap(-1, n_bytes + 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


LEVER = Lever(
    name=NAME,
    key=f"speed.{NAME}",
    summary="On the CPU, memory that tensors free is kept for the next ones instead of going back to the system.",
    doc=(
        "glibc maps a large block by itself and unmaps it when it is freed (above 128 KiB at first, above 32 MiB "
        "always), and gives back the end of the heap. Each step then takes its activations anew from the system, page "
        "by page: a fault of 4 KiB each, with zeroing, and more in a virtual machine. On a shared 2-core virtual "
        "machine a small convolutional network trained 2.4 times as fast with images of 96 pixels, at a peak of the "
        "process 26 % higher; a resnet18 with 64 pixels 1.15 times; images of 8 pixels gained nothing. tcmalloc loaded "
        "in glibc's place: 2.45, 1.19 and 1.13 times (benchmarks/results/retain_memory-cpu.json). The process stays "
        "as large as it once was, and free blocks that do not fit together make it larger. Data workers that are "
        "forked have it too."
    ),
    trades=("speed", "memory"),
    stage="environment",
    restart=True,
    candidates=lambda facts: (False, True) if facts.device_type == "cpu" else (False,),
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
)
