"""A run against the speed that was measured for its plan: when it speaks, and which reason it names."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_cases import Points, Recorder, build_config, build_workload, run_train

from fulltilt.config import config_from_values, plan_of
from fulltilt.config.model import Promise
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.loop import promise as promise_module
from fulltilt.engine.loop.promise import (
    N_SLOW_WINDOWS,
    WINDOW_S,
    Look,
    MachineLook,
    PromiseWatch,
    find_reasons,
)
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.engine.step.data_waits import DataWaits
from fulltilt.hardware import (
    CpuTimes,
    FakeNvml,
    NvmlDevice,
    NvmlProcess,
    ProcessCpu,
    build_status,
    read_machine,
    read_pressure,
)
from fulltilt.levers import compute_plan_digest
from fulltilt.records import Noted, TrialRequest, WorkloadSource
from fulltilt.tuner.answer.apply import MEASURED_ON
from fulltilt.tuner.trials.kinds import run_facts

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROMISE = Promise(samples_per_s=[900.0, 1100.0], plan="p", machine="m", threads=4, data_wait_pct=5.0)


def build_watch(looks=None):
    waiting = list(looks or [])
    return PromiseWatch(PROMISE, lambda: waiting.pop(0) if waiting else Look(time_s=0.0))


def feed(watch, rates, seconds=WINDOW_S):
    return [watch.observe(round(rate * seconds), seconds) for rate in rates]


def test_a_promise_of_a_busy_machine_is_named_as_one_where_it_is_compared():
    """``tune measured 12 to 1,100`` had no word of why so wide."""
    busy = PromiseWatch(PROMISE.model_copy(update={"cpu_pressure_pct": 98.0}), lambda: Look(time_s=0.0))
    rates = [1000, *[500] * N_SLOW_WINDOWS]
    assert "on this machine, busy then (some task waited for a core 98 % of the time): " in feed(busy, rates)[-1]
    assert "busy" not in feed(build_watch(), rates)[-1]


@pytest.mark.parametrize("rates", [[1000, 900, 1100, 2000, 870], [1, 1000, 1000, 1000], [1000, *[500, 500, 1000] * 4]])
def test_a_promise_that_is_kept_a_slow_warm_up_and_single_slow_windows_say_nothing(rates):
    assert not any(feed(build_watch(), rates))


def test_several_slow_windows_in_a_row_are_told_once_per_fall():
    watch = build_watch()
    said = feed(watch, [1000, *[500] * (N_SLOW_WINDOWS + 3)])
    assert [message is not None for message in said] == [False] * N_SLOW_WINDOWS + [True, False, False, False]
    assert "500 samples/s, tune measured 900 to 1,100" in said[N_SLOW_WINDOWS]
    assert "nothing that was looked at explains it" in said[N_SLOW_WINDOWS]
    again = feed(watch, [1000, *[500] * N_SLOW_WINDOWS])
    assert again[-1] is not None


def test_short_intervals_are_put_together():
    watch = build_watch()
    n = 20 * (N_SLOW_WINDOWS + 2)
    said = feed(watch, [500] * n, seconds=WINDOW_S / 20)
    assert sum(message is not None for message in said) == 1


SECONDS = 10.0
QUIET = Look(
    time_s=0.0,
    cpu_wait_us=0,
    disk_wait_us=0,
    memory_wait_us=0,
    cpu_times=CpuTimes(steal_jiffies=0, total_jiffies=0, idle_jiffies=0),
    own_cpu_s=0.0,
    n_threads=4,
)


def later(*, steal_s=0.0, foreign_s=0.0, own_s=10.0, wait_pct=0.0, **changes):
    """A look ten seconds on, on four cores of which this run kept one busy."""
    total, idle = 4 * SECONDS, 4 * SECONDS - own_s - foreign_s - steal_s
    times = CpuTimes(
        steal_jiffies=round(steal_s * TICKS_PER_S),
        total_jiffies=round(total * TICKS_PER_S),
        idle_jiffies=round(idle * TICKS_PER_S),
    )
    values = {"time_s": SECONDS, "cpu_times": times, "own_cpu_s": own_s, "cpu_wait_us": round(wait_pct * SECONDS * 1e4)}
    return dataclasses.replace(QUIET, **{**values, **changes})


REASONS = {
    "neighbour": (later(foreign_s=19.0, wait_pct=40), "other processes use 1.9 cores, and some task waited .* 40 %"),
    "steal": (later(steal_s=12.0), "the host took 30 % of the cores' time"),
    "disk": (later(disk_wait_us=3_000_000), "waited for the disk 30 % of the time"),
    "memory": (later(memory_wait_us=2_000_000), r"waited for memory \(is it swapping\?\) 20 %"),
    "workers": (later(n_workers=4, stopped_workers=(77,)), r"1 of 4 data workers stand still \(pid 77\)"),
    "data": (later(data_wait_s=6.0), "waited for data 60 % of the time, 5 % when tuned"),
    "threads": (later(n_threads=1), "torch uses 1 threads, 4 when tuned"),
    "clock": (
        later(throttle_reasons=("gpu_idle", "sw_thermal_slowdown"), sm_clock_mhz=900, sm_clock_max_mhz=1980),
        r"holds its clock down \(sw_thermal_slowdown, 900 of 1980 MHz\)",
    ),
    "GPU neighbours": (later(n_gpu_neighbours=2), "2 other processes use the GPU"),
}


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_is_named_alone(name):
    now, expected = REASONS[name]
    (reason,) = find_reasons(PROMISE, QUIET, now)
    assert re.search(expected, reason)


@pytest.mark.parametrize(
    "now",
    [
        later(),
        later(foreign_s=19.0, wait_pct=2),  # others are busy, and there is room for all
        later(wait_pct=60, own_s=38.0),  # the run's own workers wait for each other
        later(data_wait_s=1.2),
        later(throttle_reasons=("gpu_idle",)),
    ],
)
def test_what_is_no_reason_is_not_named(now):
    assert find_reasons(PROMISE, QUIET, now) == []


def test_what_the_machine_does_not_say_is_no_reason():
    silent = Look(time_s=0.0)
    assert find_reasons(PROMISE, silent, dataclasses.replace(silent, time_s=SECONDS)) == []


def test_a_gpu_is_asked_for_its_clock_and_its_other_processes(monkeypatch):
    device = NvmlDevice(index=0, name="x", uuid="GPU-a", memory_total_bytes=None, compute_capability=None)
    processes = (NvmlProcess(pid=os.getpid(), memory_used_bytes=1), NvmlProcess(pid=1, memory_used_bytes=1))
    status = build_status(throttle_reasons=("hw_slowdown",), sm_clock_mhz=300, processes=processes)
    monkeypatch.setattr(promise_module, "find_device_index", lambda device, nvml: 0)
    look = MachineLook(torch.device("cuda:0"), DataWaits(), FakeNvml([device], {0: status}))()
    assert (look.throttle_reasons, look.sm_clock_mhz, look.n_gpu_neighbours) == (("hw_slowdown",), 300, 1)


def test_time_in_next_is_counted_and_nothing_else():
    clock = DataWaits()

    def slow():
        for i in range(3):
            time.sleep(0.01)
            yield i

    began_s = time.perf_counter()
    batches = clock.count(slow())
    assert [next(batches), next(batches, None)] == [0, 1]
    in_next_s = time.perf_counter() - began_s
    time.sleep(0.05)
    assert list(batches) == [2]
    assert next(batches, "end") == "end"
    assert 0 < clock.seconds < time.perf_counter() - began_s - 0.04
    assert in_next_s > 0


def promise_for_this(**changes):
    """A configuration with a promise that no machine can keep."""
    values = {"plan": compute_plan_digest(plan_of(build_config())), "machine": read_machine().hostname_hash, **changes}
    return build_config(run__promise={"samples_per_s": [1e9, 2e9], **values})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"plan": "other"}, "of another plan (other, this is "),
        ({"machine": "other"}, "of another machine (other, this is "),
        ({"device": "NVIDIA H100"}, "of another device (NVIDIA H100, this is cpu)"),
        ({"model": "ResNet"}, "of another model (ResNet, this is Sequential)"),
        ({"n_parameters": 3}, "of another model, by its number of parameters (3, this is "),
        ({"data": "CIFAR10, 50000 samples"}, "of another data set (CIFAR10, 50000 samples, this is Points, "),
    ],
)
def test_a_promise_of_something_else_is_not_held_against_the_run(tmp_path, changes, expected):
    config = promise_for_this(**changes)
    result, recorder = run_train(tmp_path, config)
    (said,) = [note for note in result.notes if "not held against this run" in note]
    assert expected in said
    assert not any("tune measured" in note.message for note in recorder.of(Noted))


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_run_is_held_to_a_promise_that_was_made_of_the_same_things(is_busy):
    """What the tuner's probe says of a workload is what a training run of it finds."""
    values = {"task": "training_cases:build_workload", "data": {"batch_size": 16}}
    config = config_from_values(values, base_dir=str(Path(__file__).parent))
    plan = plan_of(config)
    source = WorkloadSource(config=config.to_values(), base_dir=config.base_dir)
    answers = []
    run_facts(TrialRequest(id="facts", source=source, plan=plan, device="cpu", n_steps=1), answers.append)
    measured = {key: answers[-1]["workload"][name] for key, name in MEASURED_ON.items()}
    assert measured["data"] == "Points, 90 samples"
    promise = {"samples_per_s": [1, 2], "plan": compute_plan_digest(plan), "machine": read_machine().hostname_hash}
    promise |= measured | ({"cpu_pressure_pct": 98.0} if is_busy else {})
    promised = config_from_values({**values, "run": {"promise": promise}}, base_dir=config.base_dir)
    with build_run(promised, plan, device="cpu") as run:
        watch, note = promise_module.build_watch(run)
    assert type(watch) is PromiseWatch
    assert (note or "").startswith("run.promise (1 to 2 samples/s) was measured on a busy machine" if is_busy else "")
    assert (note is not None) == is_busy


BURN = """
import os, signal
for _ in range(2):
    if os.fork() == 0:
        signal.alarm(600)
        while True: pass
"""
"""Leaves its processes behind: what has the run for a parent counts as the run's own."""


@contextlib.contextmanager
def busy_core():
    """Two processes burn the one core that this process may use meanwhile, however many there are."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    neighbour = subprocess.Popen([sys.executable, "-c", BURN], start_new_session=True)
    try:
        neighbour.wait()
        yield
    finally:
        os.killpg(neighbour.pid, signal.SIGKILL)
        os.sched_setaffinity(0, before)


def wait_for_pressure(pct=25.0, limit_s=20.0):
    """Burn along until the kernel tells of tasks that wait; some kernels and containers never do."""
    before_us = read_pressure().some_total_us
    began_s = look_s = time.perf_counter()
    while before_us is not None and look_s - began_s < limit_s:
        if look_s - began_s > 4 and (read_pressure().some_total_us - before_us) / (look_s - began_s) / 1e4 > pct:
            return
        look_s = time.perf_counter()
    pytest.skip("needs a kernel that tells of tasks that wait for a core (/proc/pressure/cpu)")


def find_what_a_run_says(folder, dataset, **promised):
    """Train with a promise that can never be met until the run says why it is not."""
    config = promise_for_this(**promised)
    config = config.model_copy(update={"run": config.run.model_copy(update={"epochs": 100_000})})
    spoken = []

    class Stop(Recorder):
        def __call__(self, event):
            if isinstance(event, Noted) and "tune measured" in event.message:
                spoken.append(event.message)
                signal.raise_signal(signal.SIGINT)

    workload = build_workload(dataset=dataset, validation=None)
    with pytest.raises(KeyboardInterrupt):
        run_train(folder, config, Stop(), workload=workload)
    return spoken[0]


@pytest.mark.slow
def test_a_real_neighbour_is_named(tmp_path, monkeypatch):
    """The promise can never be met, so the run asks why; the answer has to be what burns its core."""
    monkeypatch.setattr(promise_module, "WINDOW_S", 0.8)  # the kernel adds up pressure every 2 s: three of them
    with busy_core():
        wait_for_pressure()
        said = find_what_a_run_says(tmp_path, lambda: Points(noise=0))
    # Where the host is short of cores itself, that is the reason and the neighbour is not.
    assert re.search("CPU pressure: (other processes use|the host took)", said)


class SlowPoints(Points):
    """A sample comes as late as from a disk that is asked for each alone."""

    def __getitem__(self, index):
        time.sleep(0.002)
        return super().__getitem__(index)


def test_data_that_became_slow_and_another_number_of_threads_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(promise_module, "WINDOW_S", 0.3)
    n_threads = torch.get_num_threads()
    said = find_what_a_run_says(tmp_path, lambda: SlowPoints(noise=0), data_wait_pct=5.0, threads=n_threads + 6)
    assert f"torch uses {n_threads} threads, {n_threads + 6} when tuned" in said
    found = re.search(r"the loop waited for data (\d+) % of the time, 5 % when tuned", said)
    assert found, said
    assert 20 < int(found[1]) <= 100


@pytest.mark.parametrize(("promised", "n_ranks"), [(1, 2), (2, 1)])
def test_a_promise_is_held_against_as_many_processes_as_it_was_measured_with(promised, n_ranks):
    config = promise_for_this(n_ranks=promised)
    run = SimpleNamespace(config=config, world=World(n_ranks=n_ranks))
    watch, note = promise_module.build_watch(run)
    assert watch is None
    assert f"measured with run.n_ranks {promised}, and this run has {n_ranks}" in note
    with build_run(config, plan_of(config), device="cpu", workload=build_workload()) as same:
        same.world = World(n_ranks=promised)
        assert isinstance(promise_module.build_watch(same)[0], PromiseWatch)
        same.world = ALONE


def test_the_cores_that_other_ranks_use_are_the_runs_own(monkeypatch):
    """all ranks are children of the process that started them"""
    times = {os.getpid(): 1.0, os.getppid(): 9.0}
    monkeypatch.setattr(
        promise_module,
        "read_process_tree_cpu",
        lambda pid: ProcessCpu(cpu_s=times[pid], n_children=0, stopped=()),
    )
    looks = [MachineLook(torch.device("cpu"), DataWaits(), n_ranks=n) for n in (1, 2)]
    assert [look().own_cpu_s for look in looks] == [1.0, 9.0]
