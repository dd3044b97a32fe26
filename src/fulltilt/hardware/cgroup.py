"""Read the limits that control groups set for this process, v1 and v2, nested ones included.

Source: Linux Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, proc_pid_mountinfo(5).
"""

from collections.abc import Iterator
from pathlib import Path

from fulltilt.hardware._files import Root, parse_table, read_text
from fulltilt.hardware.filesystem import read_mounts

UNLIMITED_BYTES = 1 << 60  # v1 writes "no limit" as the largest page-aligned 63-bit number
_MEMORY_FILES = (  # of v2, of v1: limit, usage, pages of files that were not used lately
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def read_memory_limit_bytes(root: Root = "/") -> int | None:
    """Read the smallest memory limit from this process' group up to the top; ``None`` when nothing limits it."""
    return min((limit for limit, _ in _read_memory_groups(root)), default=None)


def read_memory_room_bytes(root: Root = "/") -> int | None:
    """Read what the control groups still let this process take; ``None`` when nothing limits it.

    It is the smallest room of all groups from this process' own up to the top one, so neighbours in them count. Pages
    of files that were not used lately count as room: the kernel takes them back before it refuses anything.
    """
    return min((max(0, limit - used) for limit, used in _read_memory_groups(root)), default=None)


def read_cpu_quota_cores(root: Root = "/") -> float | None:
    """Read the CPU time per wall time that the groups allow, in cores; ``None`` without a quota."""
    quotas = [quota for folder in _group_folders(root, "cpu") if (quota := _read_quota(root, folder)) is not None]
    return min(quotas, default=None)


def read_oom_kills(root: Root = "/") -> int | None:
    """Count what the kernel's out-of-memory killer has ended: in this group, else on the whole machine.

    Only the rise between two readings says something. ``None`` where the kernel does not count.
    """
    for folder in _group_folders(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            count = parse_table(read_text(root, f"{folder}/{name}") or "").get("oom_kill")
            if count is not None:
                return count
    return parse_table(read_text(root, "/proc/vmstat") or "").get("oom_kill")


def _read_memory_groups(root: Root) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of every group with a limit; idle pages of files are not used."""
    for folder in _group_folders(root, "memory"):
        for limit_name, usage_name, idle_name in _MEMORY_FILES:
            limit, usage = ((read_text(root, f"{folder}/{name}") or "").strip() for name in (limit_name, usage_name))
            if limit.isdigit() and int(limit) < UNLIMITED_BYTES:
                idle_bytes = parse_table(read_text(root, f"{folder}/memory.stat") or "").get(idle_name, 0)
                yield int(limit), max(0, int(usage) - idle_bytes) if usage.isdigit() else 0


def _read_quota(root: Root, folder: str) -> float | None:
    v2 = (read_text(root, f"{folder}/cpu.max") or "").split()
    if len(v2) == 2 and v2[0].isdigit():
        return int(v2[0]) / int(v2[1])
    quota = (read_text(root, f"{folder}/cpu.cfs_quota_us") or "").strip()
    period = (read_text(root, f"{folder}/cpu.cfs_period_us") or "").strip()
    if quota.isdigit() and period.isdigit() and int(quota) > 0:
        return int(quota) / int(period)
    return None


def _group_folders(root: Root, controller: str) -> Iterator[str]:
    """Yield the folders of this process' groups for ``controller``, innermost first; v2 before v1."""
    lines = [line.split(":", 2) for line in (read_text(root, "/proc/self/cgroup") or "").splitlines()]
    groups = [(controllers, path) for _, controllers, path in (line for line in lines if len(line) == 3)]
    mounts = read_mounts(root)
    v2 = [(path, m) for controllers, path in groups if not controllers for m in mounts if m.type == "cgroup2"]
    v1 = [
        (path, mount)
        for controllers, path in groups
        for mount in mounts
        if mount.type == "cgroup" and all(controller in text.split(",") for text in (controllers, mount.options))
    ]
    for path, mount in v2 + v1:
        # In a container without a group namespace the mount may show another part of the tree: its top is then all
        # there is to read.
        below = Path(path).relative_to(mount.root) if Path(path).is_relative_to(mount.root) else Path()
        parts = [part for part in below.parts if part not in ("/", "..")]
        for n in range(len(parts), -1, -1):
            yield "/".join([mount.point.rstrip("/"), *parts[:n]])
