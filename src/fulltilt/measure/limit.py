"""Limit memory so that a trial raises an out-of-memory error before the machine suffers.

GPU: the caching allocator refuses to grow past its share of the device.

CPU: ``RLIMIT_DATA`` makes mmap and brk fail, so that torch raises as it does on a full machine. The kernel counts
*mapped* private writable pages against it, touched or not, where a memory limit means resident ones. So the limit is
mapped now (VmData) + (limit − resident now) + 8 MiB of stack per thread.

``RLIMIT_AS`` would refuse what fits: torch maps several GiB of libraries and reservations. ``RLIMIT_DATA`` is one
process' own and blind to shared memory; ``hardware.MemoryWatchdog`` counts data workers and /dev/shm.

Source: setrlimit(2); mm/mmap.c ``may_expand_vm`` of Linux for what is counted.
"""

import os
import resource

import torch

from fulltilt.errors import DeviceError, DeviceMemoryError
from fulltilt.hardware import read_rss_bytes, read_status_bytes
from fulltilt.records import format_bytes

_STACK_BYTES = 8 * 2**20
_LIMITS_BYTES: dict[str, int] = {}  # by type of the device: neither torch nor the kernel tells the value again
_SPARE_THREADS = 4  # samplers, autograd's device thread, the loader's pin thread


def apply_memory_limit(device: torch.device | str, limit_bytes: int) -> None:
    """Limit what this process may use from now on; the data workers it starts inherit the limit each.

    A second call replaces the first on a GPU, and can only tighten on a CPU.

    Raises:
        DeviceMemoryError: this process uses more than the limit already.
        DeviceError: the device knows no limit.
    """
    device = torch.device(device)
    if device.type == "cuda":
        _limit_cuda(device, limit_bytes)
    elif device.type == "cpu":
        _limit_cpu(limit_bytes)
    else:
        raise DeviceError(f"no memory limit for device {device}: fulltilt limits cpu and cuda")
    _LIMITS_BYTES[device.type] = limit_bytes


def find_memory_limit_bytes(device: torch.device | str) -> int | None:
    """Find the limit that ``apply_memory_limit`` put on this process for the device; None: none."""
    return _LIMITS_BYTES.get(torch.device(device).type)


def compute_data_limit_bytes(*, mapped_bytes: int, resident_bytes: int, limit_bytes: int, n_threads: int) -> int:
    """Compute the value for ``RLIMIT_DATA`` (see the head of this file).

    Raises:
        DeviceMemoryError: ``resident_bytes`` is above ``limit_bytes`` already.
    """
    if resident_bytes >= limit_bytes:
        raise _build_error(limit_bytes, resident_bytes, "memory")
    return mapped_bytes + limit_bytes - resident_bytes + (n_threads + _SPARE_THREADS) * _STACK_BYTES


def _limit_cpu(limit_bytes: int) -> None:
    resident_bytes = read_rss_bytes(os.getpid())
    if resident_bytes is None:
        raise DeviceError("no memory limit on this system: it has no /proc/self/statm")
    value = compute_data_limit_bytes(
        mapped_bytes=read_status_bytes("VmData") or 0,
        resident_bytes=resident_bytes,
        limit_bytes=limit_bytes,
        n_threads=torch.get_num_threads() + torch.get_num_interop_threads(),
    )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)  # stays: a user's code may set its own
    resource.setrlimit(resource.RLIMIT_DATA, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_cuda(device: torch.device, limit_bytes: int) -> None:
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    reserved_bytes = torch.cuda.memory_reserved(device)
    if reserved_bytes >= limit_bytes:
        raise _build_error(limit_bytes, reserved_bytes, f"{device} memory")
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def _build_error(limit_bytes: int, used_bytes: int, what: str) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"the memory limit of {format_bytes(limit_bytes)} is out of memory from the start: the process uses "
        f"{format_bytes(used_bytes)} of {what} before the first batch; set a limit above that"
    )
