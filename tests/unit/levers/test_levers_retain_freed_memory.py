"""Memory that tensors free, kept by the C library: seen in processes of their own, which is where it can be set."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fulltilt.levers import Facts, find_obstacles
from fulltilt.levers.retain_freed_memory import find_obstacle

pytestmark = pytest.mark.skipif(find_obstacle() is not None, reason=f"no glibc that can keep memory: {find_obstacle()}")

PROGRAM = """
import json, resource, sys, threading
import torch
from torch.utils.data import TensorDataset
from fulltilt import Workload
from fulltilt.engine.build import build_run
from fulltilt.engine.step import TrainStep
from fulltilt.levers import default_plan, load_catalogue
from fulltilt.measure import NullTimer

N = int(sys.argv[3])

class Large(torch.nn.Linear):
    def forward(self, x):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(N)  # of 80 MB: 19,531 pages of 4 KiB, fewer where the system joins them
        self.n_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        return super().forward(x)

def limit(room_bytes):
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    limit_bytes = int(status["VmData"].split()[0]) * 1024 + room_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))

def train(plan):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 5), torch.arange(24) % 3)
    workload = Workload(model=lambda: Large(5, 3), dataset=lambda: data, loss=torch.nn.CrossEntropyLoss())
    losses = []
    with build_run(None, default_plan({"batch_size": 8, "threads": 1} | plan), device="cpu", workload=workload) as run:
        step = TrainStep(run)
        if int(sys.argv[2]):
            limit(int(sys.argv[2]))
        for epoch in range(2):
            batches = run.start_epoch(epoch)
            while (outcome := step(batches, NullTimer())) is not None:
                losses.append(outcome.loss.item())
                load_catalogue()["retain_freed_memory"].observe(run.setup)
        observed = load_catalogue()["retain_freed_memory"].observe(run.setup)
        return {"losses": losses, "faults": run.setup.model.n_faults, "observed": observed, "notes": run.setup.notes}

print(json.dumps([train({"retain_freed_memory": value}) for value in json.loads(sys.argv[1])]))
"""


def train(*values: bool, room_bytes: int = 0, n: int = 20_000_000, **environment: str) -> list[dict]:
    """What runs saw that followed each other in one process, one a value of the lever.

    Args:
        room_bytes: That the process may map beside what it has as the steps begin; 0: as much as there is.
        n: Elements of 4 bytes that each step takes and frees.
    """
    command = [sys.executable, "-c", PROGRAM, json.dumps(values), str(room_bytes), str(n)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_more_than_2_gib_is_kept_too():
    """A threshold of 2 GiB, the largest that mallopt takes, gave them all back."""
    (kept,) = train(True, n=600_000_000)
    assert kept["faults"] < 10


def count_faults(*, retain: bool) -> int:
    """Pages that the last step took anew for a block of 80 MB; what is in force is what was asked for."""
    (seen,) = train(retain)
    assert seen["observed"] is retain
    assert seen["notes"] == []
    return seen["faults"]


def test_the_same_is_learned():
    (kept,), (usual,) = train(True), train(False)
    assert kept["losses"] == usual["losses"]
    assert len(set(kept["losses"])) == 6


def test_a_run_without_it_says_that_one_before_it_kept_memory():
    """What lies free between blocks in use is still taken first; the end of the heap is given back."""
    kept, usual = train(True, False)
    assert kept["observed"]
    assert kept["faults"] < 10
    assert not usual["observed"]
    assert "goes without it" in usual["notes"][0]


@pytest.mark.parametrize("room_bytes", [500 * 2**20, 110 * 2**20], ids=["room for the probe", "none"])
@pytest.mark.parametrize("retain", [True, False])
def test_asking_under_a_memory_limit_changes_nothing(retain, room_bytes):
    """A block that glibc cannot have would move the thread to an arena without the lever: pages would be anew."""
    (free,), (limited,) = train(retain), train(retain, room_bytes=room_bytes)
    assert limited["observed"] is retain
    assert limited["notes"] == []
    assert limited["losses"] == free["losses"]
    assert (limited["faults"] < 10) is retain


def test_an_environment_that_keeps_memory_already_is_said_and_overruled():
    (usual,) = train(False, MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="2000000000")
    assert not usual["observed"]
    assert "its environment (MALLOC_" in usual["notes"][0]


def test_a_c_library_or_an_allocator_with_rules_of_its_own_is_an_obstacle(monkeypatch):
    cpu = Facts(device_type="cpu")
    assert find_obstacles({"retain_freed_memory": True}, cpu) == []
    find_obstacle.cache_clear()
    monkeypatch.setattr("os.confstr", lambda name: "glibc 2.31")
    try:
        assert "glibc 2.33 or newer, and the C library here is glibc 2.31" in find_obstacle()
        assert "retain_freed_memory=True" in find_obstacles({"retain_freed_memory": True}, cpu)[0]
        find_obstacle.cache_clear()
        monkeypatch.undo()
        monkeypatch.setattr("pathlib.Path.read_text", lambda path: "7f00 r-xp 0 /usr/lib/libjemalloc.so.2\n")
        assert "libjemalloc is loaded" in find_obstacle()
    finally:
        find_obstacle.cache_clear()
