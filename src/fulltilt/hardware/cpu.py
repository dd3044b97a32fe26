"""Cores, their load, and whether this process gets its share of them."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
from collections.abc import Mapping
from typing import Literal

from fulltilt.hardware._files import Root, parse_table, read_text
from fulltilt.hardware.cgroup import read_cpu_quota_cores


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pressure:
    """Time in which at least one task waited for a core, the disk or memory, since boot. Only its rise counts."""

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
    """Pressure of the machine on one resource.

    Source: Linux Documentation/accounting/psi.rst.
    """
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
    """Ticks from the first line of /proc/stat; guest time is left out because user time already holds it."""
    line = next((x for x in (read_text(root, "/proc/stat") or "").splitlines() if x.startswith("cpu ")), "")
    ticks = [int(x) for x in line.split()[1:9] if x.isdigit()]
    if len(ticks) < 8:
        return CpuTimes(steal_jiffies=None, total_jiffies=None, reason="/proc/stat has no cpu line with steal time")
    return CpuTimes(steal_jiffies=ticks[7], total_jiffies=sum(ticks), idle_jiffies=ticks[3] + ticks[4])


def compute_steal_pct(before: CpuTimes, after: CpuTimes) -> float | None:
    """Share of all cores' time that the host took between two readings; ``None`` when a reading is missing."""
    if None in (before.steal_jiffies, before.total_jiffies, after.steal_jiffies, after.total_jiffies):
        return None
    total = after.total_jiffies - before.total_jiffies  # type: ignore[operator]
    steal = after.steal_jiffies - before.steal_jiffies  # type: ignore[operator]
    return 100 * steal / total if total > 0 else None


def count_usable_cores(root: Root = "/") -> int:
    """Cores that this process may keep busy: affinity and cgroup quota, at least 1.

    A quota of 1.5 cores counts as 1: what runs past the quota is paused by the kernel.
    """
    allowed = _count_allowed(root) or os.cpu_count() or 1
    quota = read_cpu_quota_cores(root)
    return max(1, allowed if quota is None else min(allowed, int(quota)))


def read_cpu_model(root: Root = "/") -> str | None:
    """The processor's name; Arm kernels give none, the architecture stands in there."""
    fields: dict[str, str] = {}
    for line in (read_text(root, "/proc/cpuinfo") or "").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    for name in ("model name", "Model", "Hardware", "cpu model"):
        if fields.get(name):
            return fields[name]
    return platform.machine() or None if fields else None


def read_memory_bytes(root: Root = "/") -> tuple[int, int]:
    """Total and available memory of the machine in bytes, limits of control groups left aside.

    Kernels before 3.14 have no MemAvailable: what is free stands in.
    """
    table = parse_table(read_text(root, "/proc/meminfo") or "")
    if "MemTotal" not in table:  # no Linux: ask the way POSIX has it
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total_bytes = os.sysconf("SC_PHYS_PAGES") * page_bytes
        return total_bytes, total_bytes
    return table["MemTotal"] * 1024, table.get("MemAvailable", table.get("MemFree", 0)) * 1024


def has_c_compiler(environ: Mapping[str, str] | None = None) -> bool:
    """Whether torch.compile can build its C++ code: ``$CXX``, else g++, c++ or clang++ on the path."""
    environ = os.environ if environ is None else environ
    named = environ.get("CXX", "").split()
    candidates = named[:1] or ["g++", "c++", "clang++"]
    return any(shutil.which(name, path=environ.get("PATH", os.defpath)) for name in candidates)


def _count_allowed(root: Root) -> int | None:
    for line in (read_text(root, "/proc/self/status") or "").splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return _count_ranges(line.split(":", 1)[1].strip())
    return None


def _count_ranges(text: str) -> int | None:
    """``0-3,8`` → 5."""
    count = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            return None
        count += int(last or first) - int(first) + 1
    return count
