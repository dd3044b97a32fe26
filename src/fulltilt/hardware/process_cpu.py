"""What a process and all it started take of the cores, and which of them stand still.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

import dataclasses
import os
import re

from fulltilt.hardware._files import Root, read_text
from fulltilt.hardware.process_memory import read_process_tree

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_STOPPED_STATES = "TtZX"  # stopped by a signal or a debugger, dead and not waited for


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
    """Add up the times of ``pid`` and all it started. Cost: two small files a process."""
    members = read_process_tree(pid, root, search_session=False)
    ticks, stopped = 0, []
    for member in members:
        fields = _read_fields(member, root)
        if len(fields) < 15:
            continue
        ticks += sum(map(int, fields[11:15]))
        if member != pid and fields[0] in _STOPPED_STATES:
            stopped.append(member)
    return ProcessCpu(cpu_s=ticks / _TICKS_PER_S, n_children=max(0, len(members) - 1), stopped=tuple(stopped))


def is_process_stopped(pid: int, root: Root = "/") -> bool:
    """Whether a signal or a debugger stopped it; false where that cannot be read."""
    return _read_fields(pid, root)[:1] in (["T"], ["t"])


def describe_process_state(pid: int, root: Root = "/") -> str:
    """What a process is doing, in words: ``computes``, ``is stopped by a signal (kill -CONT 12 lets it go on)``."""
    states = {
        "R": "computes",
        "S": "waits, for a lock, a pipe or the network",
        "D": "waits for a disk or a network file system",
        "T": f"is stopped by a signal (kill -CONT {pid} lets it go on)",
        "t": "is stopped by a debugger",
        "Z": "is dead",
        "X": "is dead",
    }
    fields = _read_fields(pid, root)
    return states.get(fields[0], f"is in state {fields[0]}") if fields else "is gone"


def _read_fields(pid: int, root: Root) -> list[str]:
    """Of /proc/PID/stat behind the name, which may hold blanks and brackets; the state is the first."""
    return re.sub(r"^.*\)", "", read_text(root, f"/proc/{pid}/stat") or "", flags=re.DOTALL).split()
