"""Memory of real process trees: what is allocated here is what must be read."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulltilt.hardware import MemoryWatchdog, read_process_tree, read_process_tree_memory, read_rss_bytes

MIB = 2**20
GROW = f"block = bytearray(64 * {MIB}); block[::4096] = b'x' * len(block[::4096])\n"
READY_AND_WAIT = "os.write(1, b'ready\\n'); sys.stdin.readline()\n"  # one write: lines of forks do not mix


@contextlib.contextmanager
def running(code: str, *, n_ready: int = 1) -> Iterator[subprocess.Popen]:
    """A Python process in a session of its own that runs ``code`` and says "ready" ``n_ready`` times."""
    command = [sys.executable, "-S", "-c", "import os, sys, time\n" + code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, start_new_session=True) as process:
        try:
            for _ in range(n_ready):
                assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def test_one_process_is_read_as_large_as_it_is():
    with running(READY_AND_WAIT) as small, running(GROW + READY_AND_WAIT) as large:
        before, after = read_process_tree_memory(small.pid), read_process_tree_memory(large.pid)
        watchdog = MemoryWatchdog(large.pid, 256 * MIB)
        assert [watchdog.check() for _ in range(5)] == [None] * 5
    assert 64 * MIB < watchdog.peak_bytes < 256 * MIB
    assert before.n_processes == after.n_processes == 1
    for field in ("rss_bytes", "pss_bytes", "private_bytes", "standalone_bytes"):
        assert getattr(after, field) - getattr(before, field) == pytest.approx(64 * MIB, rel=0.1), field


@pytest.mark.parametrize(
    ("fork", "copied_bytes"),
    [("os.fork()\n", 0), ("if os.fork() == 0: block[::4096] = b'y' * len(block[::4096])\n", 64 * MIB)],
    ids=["shared", "copied"],
)
def test_pages_shared_inside_the_tree_count_once_and_copies_of_a_child_count(fork, copied_bytes):
    with running(GROW + READY_AND_WAIT) as alone, running(GROW + fork + READY_AND_WAIT, n_ready=2) as forked:
        one, two = read_process_tree_memory(alone.pid), read_process_tree_memory(forked.pid)
    assert two.n_processes == 2
    assert 0 < two.private_bytes <= two.pss_bytes <= two.standalone_bytes <= two.rss_bytes
    assert two.rss_bytes - one.rss_bytes > 60 * MIB
    assert two.standalone_bytes - one.standalone_bytes == pytest.approx(copied_bytes, rel=0.2, abs=16 * MIB)


def test_pages_shared_with_a_process_outside_count_in_full():
    """The zygote's case: a child in a session of its own still needs what it shares with its parent."""
    code = GROW + "pid = os.fork()\nif pid == 0: os.setsid(); time.sleep(99)\nprint(pid, flush=True)\n" + READY_AND_WAIT
    with running(code, n_ready=0) as process:
        child = int(process.stdout.readline())
        try:
            memory = read_process_tree_memory(child)
        finally:
            os.kill(child, 9)
    assert memory.n_processes == 1
    assert memory.pss_bytes < 50 * MIB
    assert memory.standalone_bytes > 64 * MIB


def test_worker_whose_parent_died_is_still_found():
    code = (
        f"if os.fork() == 0:\n  if os.fork() == 0:\n    {GROW.strip()}\n    {READY_AND_WAIT}  os._exit(0)\nos.wait()\n"
    )
    with running(code + READY_AND_WAIT, n_ready=2) as process:
        tree = read_process_tree(process.pid)
        memory = read_process_tree_memory(process.pid)
        without_session = read_process_tree(process.pid, search_session=False)
    assert len(tree) == 2
    assert without_session == (process.pid,)
    assert memory.n_processes == 2
    assert memory.standalone_bytes > 64 * MIB


def test_children_of_threads_are_found():
    code = (
        "import threading\nforked = threading.Event()\n"
        "def work():\n  if os.fork() == 0: time.sleep(300)\n  forked.set()\n  time.sleep(300)\n"
        "threading.Thread(target=work, daemon=True).start()\nforked.wait()\n" + READY_AND_WAIT
    )
    with running(code) as process:
        assert len(read_process_tree(process.pid, search_session=False)) == 2


def test_processes_that_ended_read_as_nothing():
    process = subprocess.Popen(["true"])
    while ") Z " not in Path(f"/proc/{process.pid}/stat").read_text():
        time.sleep(0.01)
    assert read_process_tree_memory(process.pid).rss_bytes == 0
    process.wait()
    assert read_process_tree(process.pid) == ()
    assert read_process_tree_memory(process.pid).n_processes == 0
    assert read_rss_bytes(process.pid) is None
    watchdog = MemoryWatchdog(process.pid, 1)
    assert (watchdog.check(), watchdog.peak_bytes) == (None, 0)


def test_processes_that_come_and_go_meanwhile_do_no_harm():
    code = "while True:\n  if os.fork() == 0: os._exit(0)\n  os.wait()\n"
    with running("os.write(1, b'ready\\n')\n" + code) as process:
        readings = [read_process_tree_memory(process.pid) for _ in range(100)]
    assert all(reading.n_processes >= 1 and reading.standalone_bytes > 0 for reading in readings)


def test_kernel_without_children_files_and_rollups(plant):
    """Synthetic: 10 leads the session, 11 and 13 are its children by their stat, 12 was re-parented, 14 is foreign."""
    files = {}
    for pid, parent, session in ((10, 1, 10), (11, 10, 10), (12, 1, 10), (13, 11, 10), (14, 1, 14)):
        files[f"proc/{pid}/stat"] = f"{pid} (py) thon (x) S {parent} 10 {session} 0 -1 0\n"
        files[f"proc/{pid}/statm"] = f"100 {pid} 5 1 0 50 0\n"
        files[f"proc/{pid}/task/{pid}/comm"] = "python\n"
    root = plant(files)
    assert set(read_process_tree(10, root)) == {10, 11, 12, 13}
    assert read_process_tree(11, root) == (11, 13)
    memory = read_process_tree_memory(10, root)
    assert memory.rss_bytes == memory.standalone_bytes == (10 + 11 + 12 + 13) * os.sysconf("SC_PAGE_SIZE")
    assert (memory.pss_bytes, memory.private_bytes) == (None, None)


def test_watchdog_counts_data_workers():
    fork = "for _ in range(3):\n  if os.fork() == 0:\n    " + GROW + "    break\n"
    with running(fork + READY_AND_WAIT, n_ready=4) as process:
        watchdog = MemoryWatchdog(process.pid, 150 * MIB)
        end = time.monotonic() + 300
        while watchdog.check() is None and time.monotonic() < end:
            time.sleep(0.02)
    assert "the limit is 150 MiB" in watchdog.trip


# 32 MiB: containers have a /dev/shm of 64 MiB where nobody asked for more.
SHM_FILE = "import mmap\npath = f'/dev/shm/fulltilt-test-{os.getpid()}'\nf = open(path, 'w+b'); os.unlink(path)\n"
MAP = f"f.truncate(32 * {MIB}); m = mmap.mmap(f.fileno(), 32 * {MIB})\nfor i in range(0, len(m), 4096): m[i] = 1\n"
WRITE = f"for _ in range(32): f.write(bytes({MIB}))\nf.flush()\n"


@pytest.mark.parametrize("eat", [MAP, WRITE], ids=["mapped", "written"])
def test_watchdog_counts_shared_memory_once(eat):
    with running(SHM_FILE + eat + READY_AND_WAIT) as process:
        assert MemoryWatchdog(process.pid, 28 * MIB).check() is not None
        large = MemoryWatchdog(process.pid, 60 * MIB)
        assert large.check() is None
        assert large.peak_bytes > 32 * MIB
