"""Who belongs to a trial, read from /proc."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fulltilt.hardware import describe_process_state, proctree, read_process_tree_cpu
from fulltilt.hardware.proctree import ProcessEntry

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def entry(pid, parent, session=1):
    return ProcessEntry(pid=pid, parent_pid=parent, session=session, state="R")


def test_descendants_are_found_at_any_depth_and_in_any_session():
    entries = [entry(2, 1), entry(3, 2), entry(4, 3, session=4), entry(9, 8)]
    assert sorted(proctree.find_descendants(1, entries)) == [2, 3, 4]
    assert proctree.find_descendants(9, entries) == []


def test_a_command_name_with_parentheses_and_spaces_is_read_right(plant):
    root = plant({"proc/77/stat": "77 (a) b (c) R 5 77 42 0 -1 0", "proc/78/gone": "while it was read"})
    assert proctree.read_processes(root) == [entry(77, 5, session=42)]


def test_a_session_ends_with_what_it_started_elsewhere():
    code = f"import subprocess, time; subprocess.Popen({SLEEP!r}, start_new_session=True); print(1); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-uc", code], start_new_session=True, stdout=subprocess.PIPE) as leader:
        leader.stdout.readline()
        below = proctree.find_descendants(leader.pid)
        seen = proctree.kill_session(leader.pid)
    assert len(below) == 1
    assert {leader.pid, *below} <= set(seen)
    assert proctree.find_members(leader.pid) == []


def test_only_shared_segments_of_the_given_processes_are_removed(tmp_path):
    for name in ("torch_11_2_0", "torch_12_2_0", "psm_11", "torch_11"):
        (tmp_path / name).write_bytes(b"")
    assert proctree.remove_shared_segments({11}, tmp_path) == ["torch_11_2_0"]
    assert sorted(os.listdir(tmp_path)) == ["psm_11", "torch_11", "torch_12_2_0"]


def test_a_cleaner_is_spared_and_others_are_not():
    code = "import time; time.sleep(600)  # multiprocessing.resource_tracker"
    cleaner, other = subprocess.Popen([sys.executable, "-c", code]), subprocess.Popen(SLEEP)
    try:
        while b"-c" not in Path(f"/proc/{cleaner.pid}/cmdline").read_bytes():
            pass
        while other.poll() is None:  # during exec it has no command line, and is looked at again
            proctree.kill_processes([cleaner.pid, other.pid], spare_cleaners=True)
        assert other.returncode == -9
        cleaner.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, cleaner.pid, os.WSTOPPED)
        proctree.kill_processes([cleaner.pid], spare_cleaners=True)
        assert not proctree.is_process_stopped(cleaner.pid), "it could clean nothing"
        assert cleaner.poll() is None
        proctree.kill_processes([cleaner.pid])
        assert cleaner.wait(300) == -9
    finally:
        cleaner.kill()
        cleaner.wait()


def test_what_was_forked_just_now_is_spared_until_it_shows_that_it_is_no_cleaner(monkeypatch):
    """A resource tracker shows its parent's command line between fork and exec: killed there, it cleans up nothing."""
    code = (
        "import os, time\nchild = os.fork()\nif child and os.fork() == 0:\n"
        "    os.setsid()\n    print(child, os.getpid(), flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE) as parent:
        child, trial = map(int, parent.stdout.readline().split())
        for grace_s, ends in ((600.0, trial), (0.0, child)):  # a trial, forked to lead a session, waits for nothing
            monkeypatch.setattr(proctree, "EXEC_GRACE_S", grace_s)
            proctree.kill_processes([child, trial], spare_cleaners=True)
            while describe_process_state(ends) != "is dead":
                pass
            assert ends == child or describe_process_state(child) != "is dead"
        parent.kill()


def test_what_carries_the_mark_ends_wherever_it_went(tmp_path):
    """Forked and started, in sessions of their own, their parent gone; what has no mark stays."""
    code = (
        f"import os, subprocess, time; loner = subprocess.Popen({SLEEP!r}, start_new_session=True); child = os.fork(); "
        "child or (os.setsid(), time.sleep(600)); print(loner.pid, child)"
    )
    mark = f"FULLTILT_TEST_MARK={os.getpid()}"
    other = subprocess.Popen(SLEEP)
    env = os.environ | dict([mark.split("=")])
    with (tmp_path / "pids").open("w") as stream:  # a pipe would stay open as long as they live
        subprocess.run([sys.executable, "-c", code], stdout=stream, env=env, check=True)
    pids = {int(pid) for pid in (tmp_path / "pids").read_text().split()}
    try:
        assert set(proctree.find_marked(mark)) == pids
        assert set(proctree.kill_marked(mark)) == pids
        assert proctree.find_marked(mark) == []
        assert other.poll() is None
    finally:
        proctree.kill_processes([other.pid, *pids])
        other.wait()


def write_stat(name, state, *times):
    fields = ["0"] * 40
    fields[0], fields[1] = state, "1"
    fields[11:15] = map(str, times)
    return f"9 ({name}) {' '.join(fields)}\n"


def test_times_of_a_tree_hold_the_children_that_ended(plant):
    files = {
        "proc/100/stat": write_stat("train", "R", 200, 100, 50, 50),
        "proc/100/task/100/children": "101 102",
        "proc/101/stat": write_stat("a (worker) b", "S", 100, 0, 0, 0),
        "proc/101/task/101/children": "",
        "proc/102/stat": write_stat("worker", "T", 100, 0, 0, 0),
        "proc/102/task/102/children": "",
    }
    found = read_process_tree_cpu(100, plant(files))
    assert found.cpu_s == pytest.approx(600 / os.sysconf("SC_CLK_TCK"))
    assert (found.n_children, found.stopped) == (2, (102,))
    assert read_process_tree_cpu(99, plant({})).cpu_s == 0


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("R", "computes"),
        ("D", "waits for a disk or a network file system"),
        ("T", "is stopped by a signal (kill -CONT 7 lets it go on)"),
        ("I", "is in state I"),
    ],
)
def test_what_a_process_does_is_said_in_words(plant, state, said):
    assert describe_process_state(7, plant({"proc/7/stat": write_stat("a) b", state, 0, 0, 0, 0)})) == said
    assert describe_process_state(8, plant({})) == "is gone"
