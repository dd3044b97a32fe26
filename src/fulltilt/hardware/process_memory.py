"""Read the memory of a process and of everything it started.

Three figures, in bytes, for a tree of processes:

- ``rss``: what each process has mapped and resident, added up. Pages shared between them count several times.
- ``pss``: every page divided by the number of processes on the whole machine that map it.
- ``standalone``: what the tree would occupy if nothing outside of it shared its pages: all that the first process has
  resident, plus what only its children have. This is the figure for "does it fit", because a trial is forked from a
  process that has torch loaded, and shares its pages. Pages that two children share with each other only show in
  ``pss``, so the larger of the two is taken.

Always private ≤ pss ≤ rss, and pss ≤ standalone ≤ rss.

Source: proc_pid_smaps(5), proc_pid_statm(5), proc_pid_task_children in proc_tid_children(5).
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fulltilt.hardware._files import Root, parse_table, read_text
from fulltilt.hardware.filesystem import read_shm
from fulltilt.hardware.proctree import read_process_tree
from fulltilt.records import format_bytes

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Memory of a process tree. ``pss`` and ``private`` are ``None`` where smaps_rollup may not be read."""

    rss_bytes: int
    pss_bytes: int | None
    private_bytes: int | None
    standalone_bytes: int
    shmem_bytes: int | None  # the share of pss that lies in shared memory
    n_processes: int  # 0: the tree is gone


class _Rollup(NamedTuple):
    """Memory of one process."""

    rss_bytes: int
    pss_bytes: int
    private_bytes: int
    shmem_bytes: int


def read_process_tree_memory(pid: int, root: Root = "/") -> ProcessMemory:
    """Add up the memory of ``pid`` and all it started; processes that end meanwhile are left out.

    Cost: about 1 ms per process and 10 ms per resident GiB in small pages, and it holds the lock of the process'
    address space for reading meanwhile (measured on Linux 6.18).
    """
    rollups, readable = [], True
    for member in read_process_tree(pid, root):
        rollup = _read_rollup(member, root)
        if rollup is None:
            bare = read_rss_bytes(member, root)
            if bare is None:
                continue
            readable, rollup = False, _Rollup(bare, bare, bare, 0)
        rollups.append(rollup)
    rss, pss, private, shmem = (sum(figures) for figures in zip(_Rollup(0, 0, 0, 0), *rollups, strict=True))
    alone = rollups[0].rss_bytes + private - rollups[0].private_bytes if rollups else 0
    return ProcessMemory(
        rss_bytes=rss,
        pss_bytes=pss if readable else None,
        private_bytes=private if readable else None,
        standalone_bytes=min(rss, max(pss, alone)),
        shmem_bytes=shmem if readable else None,
        n_processes=len(rollups),
    )


def read_rss_bytes(pid: int, root: Root = "/") -> int | None:
    """Read the resident set of one process; ``None`` when it is gone. Cost: 15 µs."""
    fields = (read_text(root, f"/proc/{pid}/statm") or "").split()
    if len(fields) < 2 or fields[0] == "0":  # a zombie has no memory left
        return None
    return int(fields[1]) * _PAGE_BYTES


def read_status_bytes(name: str) -> int | None:
    """Read a figure of /proc/self/status ("VmData", "VmHWM"); None where there is none."""
    kib = parse_table(read_text("/", "/proc/self/status") or "").get(name)
    return None if kib is None else kib * 1024


def reset_peak_rss() -> bool:
    """Reset the kernel's peak of this process's resident set ("VmHWM"), and return whether that was granted.

    Source: proc_pid_clear_refs(5), value 5.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def watch_peak_bytes(device: str) -> Callable[[], int]:
    """Watch the most memory that this process holds from now on → reads it.

    It is that of torch's allocator on a GPU, else of the host; where the kernel does not reset its peak, that of the
    whole process.

    Args:
        device: As torch names it. Without torch nothing of a GPU is in use.
    """
    torch = sys.modules.get("torch")
    if device != "cpu" and torch is not None:
        torch.cuda.reset_peak_memory_stats(device)
        return lambda: torch.cuda.max_memory_reserved(device)
    reset_peak_rss()
    return lambda: read_status_bytes("VmHWM") or 0


def read_unmapped_shm_bytes(pids: tuple[int, ...], root: Root, *, mapped_bytes: int) -> int:
    """Read how many bytes in /dev/shm ``pids`` keep alive beyond the ``mapped_bytes`` they have resident.

    Kept alive by an open file or by name (torch names its files ``torch_<pid>_…``). A file that a process wrote,
    closed and left behind belongs to nobody any more and is not found; what is mapped and touched is in ``pss``.
    """
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        folder = Path(root) / f"proc/{pid}/fd"
        paths = list((Path(root) / "dev/shm").glob(f"torch_{pid}_*"))
        with contextlib.suppress(OSError):
            paths += folder.iterdir()
        for path in paths:
            with contextlib.suppress(OSError):  # closed, or gone, meanwhile
                if path.parent != folder or os.readlink(path).startswith(("/dev/shm/", "/memfd:")):
                    stat = path.stat()
                    held[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return max(0, sum(held.values()) - mapped_bytes)


def _read_rollup(pid: int, root: Root) -> _Rollup | None:
    text = read_text(root, f"/proc/{pid}/smaps_rollup")
    table = parse_table(text) if text else {}
    if "Pss" not in table:
        return None
    private = sum(table.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"))
    return _Rollup(*(1024 * kib for kib in (table["Rss"], table["Pss"], private, table.get("Pss_Shmem", 0))))


class MemoryWatchdog:
    """Watches the memory of a process tree from outside, and says when it has passed its limit.

    A limit inside the process (``measure.limit``) counts neither shared memory nor the processes it starts. Here
    ``standalone_bytes`` of the tree count, which a trial also reports as its peak, plus what the tree keeps in /dev/shm
    without having it mapped. A peak between two readings passes unseen. Whoever started the process ends it.

    Args:
        pid: First process of the tree. When it leads a session, the whole session counts.
        limit_bytes: What the tree may use.
        root: Where /proc and /dev/shm are.
    """

    def __init__(self, pid: int, limit_bytes: int, *, root: Root = "/"):
        self._pid, self._limit_bytes, self._root = pid, limit_bytes, root
        self.peak_bytes = 0
        self.trip: str | None = None  # what was seen when the limit was first passed

    def check(self) -> str | None:
        """Read once and return ``trip``. Cost: about 2 ms per process and 10 ms per resident GiB."""
        used_bytes = self.read_used_bytes()
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        if self.trip is None and used_bytes > self._limit_bytes:
            self.trip = f"process tree used {format_bytes(used_bytes)}, the limit is {format_bytes(self._limit_bytes)}"
        return self.trip

    def read_used_bytes(self) -> int:
        """Read what the tree uses now, shared memory that it has not mapped included."""
        memory = read_process_tree_memory(self._pid, self._root)
        mapped_bytes = memory.shmem_bytes or 0
        if (read_shm(self._root).used_bytes or 0) <= mapped_bytes:  # nothing lies there unmapped
            return memory.standalone_bytes
        pids = read_process_tree(self._pid, self._root)
        return memory.standalone_bytes + read_unmapped_shm_bytes(pids, self._root, mapped_bytes=mapped_bytes)
