"""How long the process that trials start from is waited for, by what is seen of it."""

import os
import re
from pathlib import Path

import pytest

from fulltilt.hardware import proctree
from fulltilt.hardware.proctree import Work
from fulltilt.records import TrialRequest, WorkloadSource
from fulltilt.tuner.trials.client import Zygote, wait_for_start
from fulltilt.tuner.trials.process import run_trial_process

READY = {"say": "ready"}
HANGS = "and it hangs: nothing computed or read for 120 s, after"


class FakeChild:
    """A process that starts on a clock of its own: at work until ``stops_s``, ready at ``ready_s``."""

    def __init__(self, *, ready_s=float("inf"), stops_s=float("inf"), is_seen=True):
        self.now_s, self.ready_s, self.stops_s, self.is_seen = 0.0, ready_s, stops_s, is_seen

    def receive(self, timeout_s):
        self.now_s += timeout_s
        return READY if self.now_s >= self.ready_s else None

    def read_work(self):
        done_s = min(self.now_s, self.stops_s)
        return Work(cpu_s=0.01 * done_s, called_bytes=0, disk_bytes=int(done_s * 2**20)) if self.is_seen else None

    def start(self):
        return wait_for_start(
            self.receive, self.read_work, limit_s=600.0, still_limit_s=120.0, clock=lambda: self.now_s
        )


def test_a_start_that_is_slow_but_at_work_or_quiet_for_a_while_is_waited_for():
    assert FakeChild(ready_s=500.0).start() == FakeChild(stops_s=40.0, ready_s=150.0).start() == READY


@pytest.mark.parametrize(
    ("child", "said"),
    [
        (FakeChild(stops_s=40.0), f"in 160 s, {HANGS} 0.4 s of CPU time, 40 MiB read"),
        (FakeChild(stops_s=0.5), f"in 121 s, {HANGS} 0.0 s of CPU time, 512 KiB read"),
        (FakeChild(), "in 600 s, though it is at work (6.0 s of CPU time, 600 MiB read): a slow disk is faster"),
        (FakeChild(is_seen=False), "in 600 s, and what the process does cannot be read from /proc"),
    ],
)
def test_a_start_that_is_given_up_says_what_was_seen_of_it(child, said):
    with pytest.raises(TimeoutError, match=f"^no answer {re.escape(said)}"):
        child.start()


def test_work_is_read_of_a_process_whatever_its_name_and_grows_with_what_it_does(tmp_path):
    before = proctree.read_work(os.getpid())
    n_bytes = len(Path(__file__).read_bytes())
    after = proctree.read_work(os.getpid())
    assert after.called_bytes >= before.called_bytes + n_bytes
    assert after.cpu_s >= before.cpu_s
    folder = tmp_path / "proc" / "77"
    folder.mkdir(parents=True)
    (folder / "stat").write_text("77 (a) b (c) R 5 77 42 0 -1 0 1 2 3 4 250 50 9 9")
    (folder / "io").write_text("rchar: 100\nwchar: 0\nread_bytes: 4096\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert proctree.read_work(77, tmp_path) == Work(cpu_s=300 / ticks, called_bytes=100, disk_bytes=4096)
    assert proctree.read_work(78, tmp_path) is None


FORKED = """
import os, signal
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
def run(message, answer):
    answer({"said": "it runs"})
"""


def test_a_trial_runs_where_a_library_resets_the_wake_up_descriptor_of_a_fork(tmp_path, monkeypatch):
    """asyncio does from Python 3.12 on; every trial ended with exit code 1 and not a word."""
    (tmp_path / "forked.py").write_text(FORKED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    source = WorkloadSource(config={}, base_dir="", import_paths=())
    request = TrialRequest(kind="trial", source=source, device="cpu", deadline_s=60.0, patience_s=60.0)
    with Zygote(
        tmp_path / "zygote.log", body="forked:run", preload=("forked", "fulltilt.tuner.trials.trial")
    ) as zygote:
        outcome = run_trial_process(request, zygote=zygote, log_path=tmp_path / "trial.log")
    assert outcome.reply["said"] == "it runs", (tmp_path / "trial.log").read_text()
