"""The executor: what a training is given, and that nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from fulltilt.lab.local import LocalExecutor, build_slots, find_out_dir, find_result
from fulltilt.lab.records import Attempt

TELL = """
import json, os, sys, time
pid = os.fork()
if pid == 0:
    os.setsid()
    time.sleep(600)
known = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "FULLTILT_ATTEMPT")}
known |= {"words": sys.argv[1:], "session": os.getsid(0), "pid": os.getpid(), "child": pid}
print(json.dumps(known), flush=True)
"""
PATIENCE_S = 60
ATTEMPT = Attempt(experiment="e7", number=3)


@pytest.fixture
def executor(tmp_path, monkeypatch) -> LocalExecutor:
    monkeypatch.setattr("fulltilt.lab.local.resolve_device", lambda name, nvml: "cpu")
    return LocalExecutor(tmp_path, build_slots([0, 1]), [sys.executable, "-c", TELL])


def wait_for_end(executor: LocalExecutor) -> list[tuple[Attempt, int]]:
    end = time.monotonic() + PATIENCE_S
    while not (ended := executor.poll()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return ended


def test_a_training_gets_its_words_its_threads_its_mark_and_leaves_nothing(executor, tmp_path):
    stale = find_result(tmp_path, ATTEMPT)
    stale.parent.mkdir()
    stale.write_text(json.dumps({"reason": "finished", "metrics": {}}))
    first, second = executor.free
    pid = executor.start(ATTEMPT, first, Path("/g.yaml"), ["optim.lr=1.0"], title="the title")
    assert executor.free == [second]
    assert wait_for_end(executor) == [(ATTEMPT, 0)]
    assert executor.free == [first, second]
    head, said = (find_out_dir(tmp_path, "e7") / "log.txt").read_text().splitlines()
    assert head == "== e7, attempt 3 on cpu:0: the title"
    told = json.loads(said)
    assert told["words"][:3] == ["/g.yaml", "optim.lr=1.0", "run.device=cpu"]
    assert told["words"][3:] == ["--resume", "--out", str(tmp_path / "e7"), "--json", str(stale)]
    assert (told["pid"], told["session"]) == (pid, pid)
    assert told["FULLTILT_ATTEMPT"] == f"{tmp_path.resolve()}/e7/3"
    assert told["OMP_NUM_THREADS"] == str(first.n_threads)
    assert not stale.exists()
    os.kill(told["child"], 0)  # it left the session, and lives
    executor.end_leftovers(ATTEMPT)
    assert not Path(f"/proc/{told['child']}/exe").exists()


def test_a_training_dies_with_its_scheduler(tmp_path):
    """in a process of its own: the death signal is that of the thread that started the training"""
    (tmp_path / "sleep.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    reading, writing = os.pipe()
    scheduler = os.fork()
    if scheduler == 0:
        executor = LocalExecutor(tmp_path, build_slots("cpu"), [sys.executable, str(tmp_path / "sleep.py")])
        pid = executor.start(ATTEMPT, executor.free[0], Path("/g.yaml"), [], title="")
        os.write(writing, str(pid).encode())
        signal.pause()
    training = int(os.read(reading, 32))
    os.kill(scheduler, signal.SIGKILL)
    os.waitpid(scheduler, 0)
    end = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{training}/exe").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.close(reading)
    os.close(writing)
