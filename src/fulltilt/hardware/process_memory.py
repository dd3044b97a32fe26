"""Memory of a process and of everything it started.

Three figures, in bytes, for a tree of processes:

- ``rss``: what each process has mapped and resident, added up. Pages shared between them count several times.
- ``pss``: every page divided by the number of processes that map it, on the whole machine. It says what the tree
  costs *here and now*: libraries shared with another process that runs the same program count half, a third, …
- ``standalone``: what the tree would occupy if nothing outside of it shared its pages: all that the first process has
  resident, plus what only its children have. This is the figure for "does it fit", because a trial forked from a
  process that has torch loaded shares those pages with it, and will not when it runs on its own. Pages that two
  children share with each other but no longer with the first process show in ``pss`` only, so the larger of the two
  is taken.

Always private ≤ pss ≤ rss, and pss ≤ standalone ≤ rss.

Source: proc_pid_smaps(5), proc_pid_statm(5), proc_pid_task_children in proc_tid_children(5).
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from fulltilt.hardware._files import Root, parse_table, read_text

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Rollup:
    rss_bytes: int
    pss_bytes: int
    private_bytes: int
    shmem_bytes: int


def read_process_tree(pid: int, root: Root = "/", *, search_session: bool = True) -> tuple[int, ...]:
    """``pid`` and all it started, itself first; empty when nothing of it is left.

    Children are followed down. When ``pid`` leads a session, the session is searched as well: a worker whose
    parent died belongs to init now, and still to the session.

    Cost: one small file per thread of the tree; the search of the session reads one per process on the machine.
    """
    found = dict.fromkeys(_read_descendants(pid, root))
    if search_session and _may_lead_session(pid, root):
        for member in _read_session(pid, root):
            found.update(dict.fromkeys(_read_descendants(member, root)))
    return tuple(found)


def read_process_tree_memory(pid: int, root: Root = "/") -> ProcessMemory:
    """Add up the memory of ``pid`` and all it started; processes that end meanwhile are left out.

    Cost: about 1 ms per process and 10 ms per resident GiB in small pages, and it holds the lock of the process'
    address space for reading meanwhile (measured on Linux 6.18).
    """
    rss = pss = private = shmem = n = 0
    first_rss = rest_private = 0
    readable = True
    for member in read_process_tree(pid, root):
        rollup = _read_rollup(member, root)
        if rollup is None:
            bare = read_rss_bytes(member, root)
            if bare is None:
                continue
            readable, rollup = False, _Rollup(rss_bytes=bare, pss_bytes=bare, private_bytes=bare, shmem_bytes=0)
        n += 1
        rss, pss, private = rss + rollup.rss_bytes, pss + rollup.pss_bytes, private + rollup.private_bytes
        shmem += rollup.shmem_bytes
        if n == 1:
            first_rss = rollup.rss_bytes
        else:
            rest_private += rollup.private_bytes
    return ProcessMemory(
        rss_bytes=rss,
        pss_bytes=pss if readable else None,
        private_bytes=private if readable else None,
        standalone_bytes=min(rss, max(pss, first_rss + rest_private)),
        shmem_bytes=shmem if readable else None,
        n_processes=n,
    )


def read_rss_bytes(pid: int, root: Root = "/") -> int | None:
    """Resident set of one process; ``None`` when it is gone. Cost: 15 µs."""
    fields = (read_text(root, f"/proc/{pid}/statm") or "").split()
    if len(fields) < 2 or fields[0] == "0":  # a zombie has no memory left
        return None
    return int(fields[1]) * _PAGE_BYTES


def read_unmapped_shm_bytes(pids: tuple[int, ...], root: Root = "/", *, mapped_bytes: int = 0) -> int:
    """Bytes in /dev/shm that ``pids`` keep alive beyond the ``mapped_bytes`` they have resident.

    Kept alive by an open file or by name (torch names its files ``torch_<pid>_…``). A file that a process wrote,
    closed and left behind belongs to nobody any more and is not found; what is mapped and touched is in ``pss``.
    """
    held: dict[tuple[int, int], int] = {}
    for pid in pids:
        for path in _find_shm_paths(pid, root):
            try:
                stat = path.stat()
            except OSError:
                continue
            held[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return max(0, sum(held.values()) - mapped_bytes)


def _find_shm_paths(pid: int, root: Root) -> list[Path]:
    paths = list((Path(root) / "dev/shm").glob(f"torch_{pid}_*"))
    try:
        entries = list((Path(root) / f"proc/{pid}/fd").iterdir())
    except OSError:
        return paths
    for entry in entries:
        try:
            target = os.readlink(entry)
        except OSError:
            continue
        if target.startswith(("/dev/shm/", "/memfd:")):
            paths.append(entry)
    return paths


def _read_rollup(pid: int, root: Root) -> _Rollup | None:
    text = read_text(root, f"/proc/{pid}/smaps_rollup")
    table = parse_table(text) if text else {}
    if "Pss" not in table:
        return None
    private = sum(table.get(name, 0) for name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"))
    return _Rollup(
        rss_bytes=table["Rss"] * 1024,
        pss_bytes=table["Pss"] * 1024,
        private_bytes=private * 1024,
        shmem_bytes=table.get("Pss_Shmem", 0) * 1024,
    )


def _read_descendants(pid: int, root: Root) -> list[int]:
    if not (Path(root) / f"proc/{pid}").exists():
        return []
    found, waiting = [], [pid]
    seen = {pid}
    while waiting:
        member = waiting.pop(0)
        found.append(member)
        fresh = [child for child in _read_children(member, root) if child not in seen]
        seen.update(fresh)
        waiting.extend(fresh)
    return found


def _read_children(pid: int, root: Root) -> list[int]:
    try:
        threads = list((Path(root) / f"proc/{pid}/task").iterdir())
    except OSError:
        return []
    children = []
    for thread in threads:
        text = read_text(thread, "children")
        if text is None and thread.exists():  # a kernel without CONFIG_PROC_CHILDREN
            return [child for child, stat in _read_stats(root).items() if stat.parent == pid]
        children += [int(child) for child in (text or "").split()]
    return children


@dataclasses.dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    session: int


def _may_lead_session(pid: int, root: Root) -> bool:
    """Its own session id says so; a leader that is gone may have left members, so absence counts as yes."""
    stat = _read_stat(pid, root)
    return stat is None or stat.session == pid


def _read_session(session: int, root: Root) -> list[int]:
    return [pid for pid, stat in _read_stats(root).items() if stat.session == session]


def _read_stats(root: Root) -> dict[int, _Stat]:
    try:
        names = [entry for entry in os.listdir(Path(root) / "proc") if entry.isdigit()]
    except OSError:
        return {}
    return {int(name): stat for name in names if (stat := _read_stat(int(name), root)) is not None}


def _read_stat(pid: int, root: Root) -> _Stat | None:
    """The command name in /proc/pid/stat may hold blanks and brackets: fields count from the last bracket."""
    fields = re.sub(r"^.*\)", "", read_text(root, f"/proc/{pid}/stat") or "", flags=re.DOTALL).split()
    return _Stat(parent=int(fields[1]), session=int(fields[3])) if len(fields) > 3 else None
