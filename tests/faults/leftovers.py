"""What a trial may leave behind, looked for from outside and by other means than the product's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

import pytest

MARK = "FULLTILT_CHAOS"


def mark_processes(monkeypatch) -> str:
    """Every process started from now on carries the mark in its environment; returns it."""
    value = secrets.token_hex(8)
    monkeypatch.setenv(MARK, value)
    return f"{MARK}={value}"


def find_processes(mark: str, *, spare: set[int | None] = frozenset()) -> list[str]:
    """Living processes that carry the mark, this one and ``spare`` left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in {os.getpid(), *spare}:
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):  # a zombie's is empty
                found.append(f"process {folder.name} {(folder / 'cmdline').read_bytes()[:60]!r}")
    return found


def find_children(pid: int) -> list[int]:
    """Children of all threads of a process, zombies included."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def find_files(folder: Path, notes: Path) -> list[str]:
    """What lies in the folder for temporary files, and what of the noted names is still there."""
    noted = notes.read_text().split() if notes.exists() else []
    return [*map(str, folder.iterdir()), *(name for name in noted if Path(name).exists())]


def find_shared_names(mark: str) -> list[str]:
    """Names in /dev/shm that hold the mark's value."""
    return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if mark.partition("=")[2] in name]


def count_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def reset_peak_memory() -> None:
    """Source: proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def read_peak_mib() -> float:
    """Largest resident set since ``reset_peak_memory``."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


@contextlib.contextmanager
def watch_leftovers(import_path: Path, **environment: str):
    """Yield a folder for temporary files and the mark of all that is started; modules of the path can be imported."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as tmp:
        patch.syspath_prepend(str(import_path))
        for name, value in ({"OMP_NUM_THREADS": "1", "TMPDIR": tmp} | environment).items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", None)
        yield Path(tmp), mark_processes(patch)


def find_all(mark: str, folder: Path, *, spare: set[int | None]) -> list[str]:
    """Processes and names in /dev/shm with the mark, and what lies in the folder for temporary files."""
    return find_processes(mark, spare=spare) + find_shared_names(mark) + [*map(str, folder.iterdir())]
