"""Limits that the control groups of this process set, v1 and v2, nested ones included.

Source: Linux Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst, proc_pid_mountinfo(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fulltilt.hardware._files import Root, parse_table, read_text
from fulltilt.hardware._mounts import read_mounts

UNLIMITED_BYTES = 1 << 60  # v1 writes "no limit" as the largest page-aligned 63-bit number
_MEMORY_FILES = (  # of v2, of v1: limit, usage, pages of files that were not used lately
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def read_memory_limit_bytes(root: Root = "/") -> int | None:
    """The smallest memory limit from this process' group up to the top one; ``None`` when nothing limits it."""
    limits = [
        int(text)
        for folder in _group_folders(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := (read_text(root, f"{folder}/{name}") or "").strip()).isdigit()
    ]
    smallest = min(limits, default=UNLIMITED_BYTES)
    return smallest if smallest < UNLIMITED_BYTES else None


def read_memory_room_bytes(root: Root = "/") -> int | None:
    """What the control groups still let this process take; ``None`` when nothing limits it.

    The smallest room of all groups from this process' own up to the top one: neighbours in them count. Pages of files
    that were not used lately count as room, since the kernel takes those back before it refuses anything.
    """
    rooms = []
    for folder in _group_folders(root, "memory"):
        for limit_name, usage_name, idle_name in _MEMORY_FILES:
            limit = (read_text(root, f"{folder}/{limit_name}") or "").strip()
            if not limit.isdigit() or int(limit) >= UNLIMITED_BYTES:
                continue
            usage = (read_text(root, f"{folder}/{usage_name}") or "").strip()
            idle_bytes = parse_table(read_text(root, f"{folder}/memory.stat") or "").get(idle_name, 0)
            used_bytes = max(0, int(usage) - idle_bytes) if usage.isdigit() else 0
            rooms.append(max(0, int(limit) - used_bytes))
    return min(rooms, default=None)


def read_cpu_quota_cores(root: Root = "/") -> float | None:
    """CPU time per wall time that the groups allow, in cores; ``None`` without a quota."""
    quotas = [quota for folder in _group_folders(root, "cpu") if (quota := _read_quota(root, folder)) is not None]
    return min(quotas, default=None)


def read_oom_kills(root: Root = "/") -> int | None:
    """How often the kernel's out-of-memory killer struck so far: in this group, else on the whole machine.

    Only the rise between two readings says something. ``None`` where the kernel does not count.
    """
    for folder in _group_folders(root, "memory"):
        for name in ("memory.events", "memory.oom_control"):
            count = parse_table(read_text(root, f"{folder}/{name}") or "").get("oom_kill")
            if count is not None:
                return count
    return parse_table(read_text(root, "/proc/vmstat") or "").get("oom_kill")


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
    """Folders of this process' groups for ``controller``, innermost first; v2 before v1 where both are mounted."""
    groups = [line.split(":", 2) for line in (read_text(root, "/proc/self/cgroup") or "").splitlines()]
    mounts = read_mounts(root)
    for unified in (True, False):
        for group in groups:
            if len(group) != 3:
                continue
            _, controllers, path = group
            if (controllers == "") is not unified or (not unified and controller not in controllers.split(",")):
                continue
            for mount in mounts:
                if mount.type == ("cgroup2" if unified else "cgroup") and (
                    unified or controller in mount.super_options.split(",")
                ):
                    yield from _walk_up(mount.point, _below(path, mount.root))


def _below(path: str, mount_root: str) -> str:
    """The group's path as seen from the mount.

    In a container without a group namespace of its own the mount shows only a part of the tree, and the group
    of the process may lie outside of it: the mount's top is then all there is to read.
    """
    if mount_root == "/":
        return path
    if path == mount_root or path.startswith(mount_root + "/"):
        return path[len(mount_root) :] or "/"
    return "/"


def _walk_up(mount_point: str, path: str) -> Iterator[str]:
    parts = [part for part in Path(path).parts if part not in ("/", "..")]
    for n in range(len(parts), -1, -1):
        yield "/".join([mount_point.rstrip("/"), *parts[:n]])
