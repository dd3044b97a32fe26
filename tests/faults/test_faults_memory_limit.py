"""Running out of memory for real: children forked from a process with torch loaded, as trials are."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fulltilt.records import Evidence, classify_outcome

ZYGOTE = """
import json, os, sys
import numpy as np, torch
from torch import nn
from fulltilt.hardware import read_rss_bytes
from fulltilt.measure.limit import apply_memory_limit
from fulltilt.measure.memory import MemoryMeter

MIB = 2**20
ballast = np.ones(384 * MIB, dtype=np.uint8)  # a peak of the parent's own, freed before any child is forked
del ballast

def fill_until(n_mib):
    blocks = []
    while n_mib is None or len(blocks) * 4 < n_mib:
        blocks.append(torch.ones(MIB))
    return len(blocks) * 4

def train(batch):
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    model(torch.randn(batch, 3, 32, 32)).sum().backward()

def use_threads():
    torch.set_num_threads(8)
    return float((torch.randn(512, 512) @ torch.randn(512, 512)).sum().isfinite())

def fork_worker(n_mib):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            fill_until(n_mib)
            os.write(write, b"fits")
        except RuntimeError as problem:
            os.write(write, type(problem).__name__.encode())
        os._exit(0)
    os.wait()
    return os.read(read, 100).decode()

def measure_peak():
    meter = MemoryMeter("cpu")
    meter.start()
    block = torch.ones(64 * MIB // 4)
    return meter.stop().rss_peak_gib

def run(case):
    used = read_rss_bytes(os.getpid())
    if case["limit_mib"] is not None:
        apply_memory_limit("cpu", case["limit_mib"] * MIB)
    result = eval(case["call"])
    return {"result": result, "used_mib": used / MIB}

for line in sys.stdin:
    case = json.loads(line)
    if os.fork() == 0:
        os.setsid()
        try:
            said = run(case)
        except BaseException as problem:
            rss_mib = read_rss_bytes(os.getpid()) / MIB
            said = {"type": type(problem).__name__, "message": str(problem), "rss_mib": rss_mib}
        os.write(1, json.dumps(said).encode() + b"\\n")
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def zygote():
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ZYGOTE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    def run(call: str, limit_mib: int | None) -> dict:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps({"call": call, "limit_mib": limit_mib}) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.communicate()


def classify(said: dict) -> str:
    evidence = Evidence(exit_code=1, exception_type=said["type"], message=said["message"])
    return classify_outcome(evidence)[0]


@pytest.mark.parametrize(
    "call", ["fill_until(None)", "np.ones(10**9)", "train(4096)", "[bytes(10**6) for _ in range(10**6)]"]
)
def test_past_the_limit_is_a_real_out_of_memory(zygote, call):
    said = zygote(call, 640)
    assert "type" in said, said
    assert classify(said) == "out_of_memory", said
    assert said["rss_mib"] < 640 + 128


def test_placements_are_planned_with_what_the_limit_leaves(zygote):
    """Bug: rows were placed in memory by what the machine had free, and then ran out of what the limit gave."""
    call = "__import__('fulltilt.data.loading.placement', fromlist=['data']).read_free_ram_bytes() / MIB"
    left_mib = 640 - zygote("None", 640)["used_mib"]
    assert 0 < zygote(call, 640)["result"] < left_mib
    assert zygote(call, None)["result"] > left_mib


def test_all_that_fits_is_given_and_a_small_step_and_its_threads_run_under_a_tight_limit(zygote):
    used_mib = zygote("None", 640)["used_mib"]
    n_mib = 4 * int(0.9 * (640 - used_mib) / 4)
    assert zygote(f"fill_until({n_mib})", 640)["result"] == n_mib
    assert classify(zygote(f"fill_until({n_mib + 256})", 640)) == "out_of_memory"
    assert zygote("use_threads()", int(used_mib) + 96)["result"] == 1.0
    assert "result" in zygote("train(4)", int(used_mib) + 256)


def test_limit_below_the_use_at_start_is_out_of_memory_and_workers_forked_under_one_have_it_too(zygote):
    said = zygote("None", 32)
    assert classify(said) == "out_of_memory"
    assert "set a limit above" in said["message"]
    assert zygote("fork_worker(32)", 640)["result"] == "fits"
    assert zygote("fork_worker(2000)", 640)["result"] == "RuntimeError"


def test_child_does_not_start_with_the_peak_of_its_parent(zygote):
    used_gib = zygote("None", None)["used_mib"] / 1024
    peak_gib = zygote("measure_peak()", None)["result"]
    assert peak_gib - used_gib == pytest.approx(64 / 1024, abs=0.03)
