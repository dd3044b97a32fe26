"""Which processes belong to a trial, and how all of them end. Linux only: /proc, sessions, death signals."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# These two remove shared memory names when the last process that used them is gone; killing them would leak the names.
CLEANERS = ("multiprocessing.resource_tracker", "torch_shm_manager")
CLEANER_GRACE_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProcessEntry:
    pid: int
    parent_pid: int
    session: int
    is_zombie: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a process has done since it started; of two readings the later one differs where it did something.

    Attributes:
        called_bytes: Read by calls, out of the page cache too.
        disk_bytes: Read from the disk, for calls and for mapped files.
    """

    cpu_s: float
    called_bytes: int
    disk_bytes: int


def set_death_signal(number: int) -> None:
    """Have the kernel send ``number`` to this process when the thread that created it ends."""
    _prctl(PR_SET_PDEATHSIG, number)


def become_subreaper() -> None:
    """Orphans below this process become its children, also those that left their session."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def read_processes(proc: Path = Path("/proc")) -> list[ProcessEntry]:
    """All processes that can be seen. Cost: one small file a process, about 20 µs each."""
    found = []
    for name in os.listdir(proc):
        if name.isdigit():
            # A process may end while it is read; it is then left out.
            with contextlib.suppress(OSError, ValueError, IndexError):
                found.append(_parse_stat(int(name), (proc / name / "stat").read_text(errors="replace")))
    return found


def read_work(pid: int, proc: Path = Path("/proc")) -> Work | None:
    """CPU time and bytes read by one process, its children left out; None where they cannot be read."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
        user, system = text[text.rindex(")") + 2 :].split()[11:13]
        counts = dict(line.split(": ") for line in (proc / str(pid) / "io").read_text().splitlines())
        called_bytes, disk_bytes = int(counts["rchar"]), int(counts["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
    cpu_s = (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return Work(cpu_s=cpu_s, called_bytes=called_bytes, disk_bytes=disk_bytes)


def find_descendants(root: int, entries: list[ProcessEntry] | None = None) -> list[int]:
    """Processes below ``root``, itself left out, whatever session they are in."""
    children: dict[int, list[int]] = {}
    for entry in read_processes() if entries is None else entries:
        children.setdefault(entry.parent_pid, []).append(entry.pid)
    found: list[int] = []
    queue = list(children.get(root, ()))
    while queue:
        pid = queue.pop()
        found.append(pid)
        queue.extend(children.get(pid, ()))
    return found


def find_members(session: int) -> list[int]:
    """Living processes of a session, and what they started in sessions of their own."""
    entries = read_processes()
    members = {e.pid for e in entries if e.session == session and not e.is_zombie}
    for pid in tuple(members):
        members.update(find_descendants(pid, entries))
    return sorted(members)


def kill_session(session: int, *, patience_s: float = 5.0) -> list[int]:
    """End every process of a session and return those that were seen; for use when its parent is gone."""
    seen: set[int] = set()
    end = time.monotonic() + patience_s
    while members := find_members(session):
        seen.update(members)
        kill_processes(members)
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return sorted(seen)


def find_marked(mark: str) -> list[int]:
    """Living processes that were started with ``mark`` (``NAME=value``) in their environment, or forked from such."""
    found = []
    for entry in read_processes():
        if entry.pid == os.getpid() or entry.is_zombie:
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in Path(f"/proc/{entry.pid}/environ").read_bytes().split(b"\0"):
                found.append(entry.pid)
    return found


def kill_marked(mark: str, *, patience_s: float = 10.0) -> list[int]:
    """End every process with this mark and return those that were seen; whatever parent or session they have now."""
    seen: set[int] = set()
    start = time.monotonic()
    while marked := find_marked(mark):
        seen.update(marked)
        waited_s = time.monotonic() - start
        kill_processes(marked, spare_cleaners=waited_s < CLEANER_GRACE_S)
        if waited_s > patience_s:
            break
        time.sleep(0.01)
    return sorted(seen)


def kill_processes(pids: list[int], *, spare_cleaners: bool = False) -> None:
    for pid in pids:
        if spare_cleaners and is_cleaner(pid):
            continue
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def is_cleaner(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(name in command for name in CLEANERS)


def remove_shared_segments(pids: set[int], folder: Path = Path("/dev/shm")) -> list[str]:
    """Remove torch's shared memory names of processes that are known to be dead.

    torch names a segment ``torch_<pid>_<random>_<count>`` after its creator.
    """
    removed = []
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            parts = name.split("_")
            if parts[0] == "torch" and len(parts) > 2 and parts[1].isdigit() and int(parts[1]) in pids:
                with contextlib.suppress(OSError):
                    (folder / name).unlink()
                    removed.append(name)
    return removed


def _parse_stat(pid: int, text: str) -> ProcessEntry:
    # The command name stands in parentheses and may itself hold any character.
    state, parent, _group, session = text[text.rindex(")") + 2 :].split()[:4]
    return ProcessEntry(pid=pid, parent_pid=int(parent), session=int(session), is_zombie=state == "Z")


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
