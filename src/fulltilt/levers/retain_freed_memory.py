"""retain_freed_memory: the C library keeps what tensors free for the next ones, instead of giving it back."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt.levers._spec import Facts, Lever, Setup

NAME = "retain_freed_memory"

# Parameters of mallopt(3) in <malloc.h>, and what glibc begins with or, of the thresholds, comes to by its own rule.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4
RETAINING = {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_MAX: 0}
USUAL = {M_TRIM_THRESHOLD: 64 * 2**20, M_MMAP_THRESHOLD: 32 * 2**20, M_MMAP_MAX: 65536}

# Larger than what a process has free in one piece; the second where no process may have so much. Above 32 MiB both:
# freeing a smaller mapped block moves glibc's own threshold.
PROBES_BYTES = (2**30, 64 * 2**20)
OTHER_ALLOCATORS = re.compile(r"/lib(jemalloc|tcmalloc|mimalloc|hoard)[^/]*\.so")


class _Statistics(ctypes.Structure):
    """``struct mallinfo2``: of these only the number of blocks that are mapped by themselves is read."""

    _fields_ = [("_before", ctypes.c_size_t * 3), ("hblks", ctypes.c_size_t), ("_behind", ctypes.c_size_t * 6)]


@functools.cache
def find_obstacle() -> str | None:
    """Why this process' memory is not glibc's to keep; None where it is."""
    known = (os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None) or ""
    version = tuple(int(part) for part in re.findall(r"\d+", known)[:2])
    if version < (2, 33):
        return f"it takes glibc 2.33 or newer, and the C library here is {known or 'another one'}; use {NAME} false"
    found = OTHER_ALLOCATORS.search(Path("/proc/self/maps").read_text())
    if found is not None:
        return f"lib{found[1]} is loaded in glibc's place, with rules of its own; use {NAME} false"
    return None


def _guard(value: bool, plan: Mapping[str, Any], facts: Facts) -> str | None:
    if not value:
        return None
    if facts.device_type != "cpu":
        return f"the tensors of a step lie in the device's memory, which has an allocator of its own; use {NAME} false"
    return find_obstacle()


def _apply(setup: Setup, value: bool) -> None:
    if value:
        _set(RETAINING)
        if not _observe(setup):
            setup.notes.append(
                f"{NAME}=True has no effect on large blocks: this thread uses another arena, as where "
                "memory ran out before or training runs beside the main thread; begin the training in a process anew"
            )
    elif _observe(setup):
        _set(USUAL)
        ctypes.CDLL(None).malloc_trim(0)  # else large blocks still come from what was kept
        setup.notes.append(
            f"{NAME}=False: this process, or its environment (MALLOC_MMAP_MAX_, GLIBC_TUNABLES), had it on; the run "
            f"goes without it, by fixed thresholds; set speed.{NAME} to true to keep it"
        )


def _set(values: Mapping[int, int]) -> None:
    libc = ctypes.CDLL(None)
    refused = [number for number, value in values.items() if not libc.mallopt(number, value)]
    if refused:
        raise OSError(f"mallopt refused parameter {refused[0]} with the value {values[refused[0]]}; use {NAME} false")


def _observe(setup: Setup) -> bool:
    """Whether a large block comes from what the process keeps; usually it is mapped by itself, and unmapped when freed.

    The block is not touched, so that it takes addresses and no memory.
    """
    if find_obstacle() is not None:
        return False
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    libc.mallinfo2.restype = _Statistics
    for n_bytes in PROBES_BYTES:
        before = libc.mallinfo2().hblks
        block = libc.malloc(n_bytes)
        n_mapped = libc.mallinfo2().hblks - before
        libc.free(block)
        if block is not None:
            return n_mapped == 0
    return False


LEVER = Lever(
    name=NAME,
    key=f"speed.{NAME}",
    type=bool,
    default=False,
    summary="On the CPU, memory that tensors free is kept for the next ones instead of going back to the system.",
    doc=(
        "glibc maps a large block by itself and unmaps it when it is freed (above 128 KiB at first, above 32 MiB "
        "always), and gives back the end of the heap. Each step then takes its activations anew from the system, page "
        "by page: a fault of 4 KiB each, with zeroing, and more in a virtual machine. On a shared 2-core virtual "
        "machine a small convolutional network trained 2.4 times as fast with images of 96 pixels, a resnet18 1.15 "
        "times with 64; images of 8 pixels gained nothing (benchmarks/results/retain_memory-cpu.json; tcmalloc loaded "
        "in glibc's place came to the same). The process stays as large "
        "as it once was, and free blocks that do not fit together make it larger. Data workers that are forked have "
        "it too."
    ),
    trades=("speed", "memory"),
    stage="environment",
    restart=True,
    candidates=lambda facts: (False, True) if facts.device_type == "cpu" else (False,),
    guard=_guard,
    apply=_apply,
    observe=_observe,
)
