"""Cores, their load, and whether this process gets its share of them."""

import dataclasses
import os
import platform
import shutil
from collections.abc import Mapping
from typing import Literal

from fulltilt.hardware._files import Root, parse_table, read_text
from fulltilt.hardware.cgroup import read_cpu_quota_cores
from fulltilt.levers.thread_affinity import list_cores


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """Time since boot in which at least one task waited for a core, the disk or memory. Only its rise counts."""

    some_total_us: int | None
    reason: str | None = None  # why there is no figure


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Clock ticks of all cores since boot. ``steal``: the host ran something else while a task was ready."""

    steal_jiffies: int | None
    total_jiffies: int | None
    reason: str | None = None
    idle_jiffies: int | None = None  # waiting for the disk included


def read_pressure(root: Root = "/", resource: Literal["cpu", "io", "memory"] = "cpu") -> Pressure:
    """Read how long tasks waited for one resource. Source: Linux Documentation/accounting/psi.rst."""
    text = read_text(root, f"/proc/pressure/{resource}")
    if text is None:
        return Pressure(some_total_us=None, reason=f"this kernel offers no /proc/pressure/{resource} (PSI)")
    for line in text.splitlines():
        name, *pairs = line.split()
        total = dict(pair.split("=", 1) for pair in pairs if "=" in pair).get("total", "")
        if name == "some" and total.isdigit():
            return Pressure(some_total_us=int(total))
    return Pressure(some_total_us=None, reason=f"/proc/pressure/{resource} has no line 'some … total='")


def read_cpu_times(root: Root = "/") -> CpuTimes:
    """Read the first line of /proc/stat; guest time is left out because user time already holds it."""
    line = next((x for x in (read_text(root, "/proc/stat") or "").splitlines() if x.startswith("cpu ")), "")
    ticks = [int(x) for x in line.split()[1:9] if x.isdigit()]
    if len(ticks) < 8:
        return CpuTimes(steal_jiffies=None, total_jiffies=None, reason="/proc/stat has no cpu line with steal time")
    return CpuTimes(steal_jiffies=ticks[7], total_jiffies=sum(ticks), idle_jiffies=ticks[3] + ticks[4])


def compute_steal_pct(before: CpuTimes, after: CpuTimes) -> float | None:
    """Compute the share of all cores' time that the host took between two readings; ``None`` without both."""
    if before.steal_jiffies is None or before.total_jiffies is None:
        return None
    if after.steal_jiffies is None or after.total_jiffies is None or after.total_jiffies <= before.total_jiffies:
        return None
    return 100 * (after.steal_jiffies - before.steal_jiffies) / (after.total_jiffies - before.total_jiffies)


def count_usable_cores(root: Root = "/") -> int:
    """Count the cores that this process may keep busy by affinity and cgroup quota, at least 1.

    A quota of 1.5 cores counts as 1: what runs past the quota is paused by the kernel.
    """
    allowed = len(list_cores()) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_cpu_quota_cores(root)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def read_cpu_model(root: Root = "/") -> str | None:
    """Read the processor's name; Arm kernels give none, the architecture stands in there."""
    pairs = [line.split(":", 1) for line in (read_text(root, "/proc/cpuinfo") or "").splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in reversed(pairs)}  # of the first core
    for name in ("model name", "Model", "Hardware", "cpu model"):
        if fields.get(name):
            return fields[name]
    return platform.machine() or None if fields else None


_INSTRUCTION_SETS = {
    "amx_int8": "AMX", "avx512_vnni": "AVX512_VNNI", "avx512f": "AVX512", "avx_vnni": "AVX2_VNNI", "avx2": "AVX2",
}  # fmt: skip
"""Flag of /proc/cpuinfo → name, the widest first."""


def read_instruction_set(root: Root = "/") -> str:
    """Read the widest vector instructions that kernels are chosen by; elsewhere than on x86 the architecture."""
    flags = set((read_text(root, "/proc/cpuinfo") or "").partition("flags")[2].partition("\n")[0].split())
    return next((name for flag, name in _INSTRUCTION_SETS.items() if flag in flags), platform.machine())


def read_memory_bytes(root: Root = "/") -> tuple[int, int]:
    """Read total and available memory of the machine in bytes, limits of control groups left aside."""
    table = parse_table(read_text(root, "/proc/meminfo") or "")
    if "MemAvailable" not in table:  # no Linux
        import psutil  # 30 ms, of no use elsewhere

        memory = psutil.virtual_memory()
        return memory.total, memory.available
    return table["MemTotal"] * 1024, table["MemAvailable"] * 1024


def has_c_compiler(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torch.compile can build its C++ code: by ``$CXX``, else g++, c++ or clang++ on the path."""
    environ = os.environ if environ is None else environ
    candidates = environ.get("CXX", "").split()[:1] or ["g++", "c++", "clang++"]
    return any(shutil.which(name, path=environ.get("PATH", os.defpath)) for name in candidates)
