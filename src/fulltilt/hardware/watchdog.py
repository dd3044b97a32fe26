"""Watch the memory of a process tree from outside, and say when it has passed its limit.

A limit inside the process (``measure.limit``) counts neither shared memory nor the processes it starts. The watchdog
only reports; whoever started the process ends it.
"""

from fulltilt.hardware._files import Root
from fulltilt.hardware.filesystem import read_shm
from fulltilt.hardware.process_memory import read_process_tree, read_process_tree_memory, read_unmapped_shm_bytes
from fulltilt.records import format_bytes


class MemoryWatchdog:
    """Reads a tree's memory until it passes the limit.

    What counts is ``standalone_bytes`` of the tree (see ``process_memory``), which is also what a trial reports as its
    peak, plus what the tree keeps in /dev/shm without having it mapped. Whoever watches calls ``check()`` as often as
    the cost of a reading allows; a peak between two readings passes unseen.

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
