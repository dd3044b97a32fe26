"""What a trial may leave behind, looked for from outside and by other means than the product's own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fulltilt.tuner.trials.process import Zygote

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


SLOW = Path(__file__).with_name("train_slowly.py")


def start_slowly(out_dir: Path, *flags: str) -> subprocess.Popen:
    """Start ``train_slowly.py`` in a process group of its own."""
    command = [sys.executable, "-u", str(SLOW), str(out_dir), *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for_line(process: subprocess.Popen, is_it: Callable[[str], bool]) -> str:
    """Return the next line of its output that is meant."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if is_it(line):
            return line
    raise AssertionError("".join([*lines, process.stderr.read()]))


def wait_for_step(process: subprocess.Popen, step: int) -> None:
    wait_for_line(process, lambda line: line.startswith("step ") and int(line.split()[1]) >= step)


def read_step(out_dir: Path) -> int:
    """Return the step of a run's checkpoint."""
    import torch

    return torch.load(out_dir / "checkpoint.pt", weights_only=True)["progress"]["step"]


def reset_peak_memory() -> None:
    """Source: proc_pid_clear_refs(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def read_peak_mib() -> float:
    """Largest resident set since ``reset_peak_memory``."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


@contextlib.contextmanager
def watch_leftovers(**environment: str):
    """Yield a folder for temporary files and the mark of all that is started; modules beside this can be imported."""
    here = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as tmp:
        for path in (here.parent / "chaos", here):
            patch.syspath_prepend(str(path))
        for name, value in ({"OMP_NUM_THREADS": "1", "TMPDIR": tmp} | environment).items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", None)
        yield Path(tmp), mark_processes(patch)


@contextlib.contextmanager
def watch_zygote(folder: Path, *, body: str | None = None, preload: tuple[str, ...] | None = None, **environment: str):
    """Yield a zygote of trials, and what lists all that they left; in the end that is nothing."""
    given = {name: value for name, value in (("body", body), ("preload", preload)) if value is not None}
    with watch_leftovers(**environment) as (tmp, mark):
        zygote = Zygote(folder / "zygote.log", **given)

        def find_leftovers() -> list[str]:
            files = [*map(str, tmp.iterdir())]
            return find_processes(mark, spare={zygote.pid}) + find_shared_names(mark) + files

        with contextlib.closing(zygote):
            yield zygote, find_leftovers
        assert find_leftovers() == []
