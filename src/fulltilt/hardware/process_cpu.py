"""CPU time of a process tree, and what its processes are doing."""

import dataclasses
import os

from fulltilt.hardware._files import Root
from fulltilt.hardware.process_memory import read_process_tree
from fulltilt.hardware.proctree import read_process

_STOPPED_STATES = "TtZX"  # stopped by a signal or a debugger, dead and not waited for
_STATES = {
    "R": "computes",
    "S": "waits, for a lock, a pipe or the network",
    "D": "waits for a disk or a network file system",
    "T": "is stopped by a signal (kill -CONT {pid} lets it go on)",
    "t": "is stopped by a debugger",
    "Z": "is dead",
    "X": "is dead",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessCpu:
    """One reading of a process tree.

    Attributes:
        cpu_s: User and system time of all, those that ended and were waited for included.
        n_children: Processes below the first one.
        stopped: Ids of those that do nothing and will not by themselves.
    """

    cpu_s: float
    n_children: int
    stopped: tuple[int, ...]


def read_process_tree_cpu(pid: int, root: Root = "/") -> ProcessCpu:
    """Add up the CPU times of ``pid`` and all it started. Cost: two small files per process."""
    members = read_process_tree(pid, root, search_session=False)
    entries = [entry for member in members if (entry := read_process(member, root)) is not None]
    return ProcessCpu(
        cpu_s=sum(entry.cpu_ticks + entry.children_cpu_ticks for entry in entries) / os.sysconf("SC_CLK_TCK"),
        n_children=max(0, len(members) - 1),
        stopped=tuple(entry.pid for entry in entries if entry.pid != pid and entry.state in _STOPPED_STATES),
    )


def is_process_stopped(pid: int) -> bool:
    """Whether a signal or a debugger stopped the process; False where that cannot be read."""
    entry = read_process(pid)
    return entry is not None and entry.state in "Tt"


def describe_process_state(pid: int, root: Root = "/") -> str:
    """Say what a process is doing: ``computes``, ``is stopped by a signal (kill -CONT 12 lets it go on)``."""
    entry = read_process(pid, root)
    return "is gone" if entry is None else _STATES.get(entry.state, f"is in state {entry.state}").format(pid=pid)
