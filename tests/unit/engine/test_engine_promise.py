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

import pytest
import torch
from tests.fake_nvml import FakeNvml, build_status
from training_cases import Points, build_config, build_cpu_run, build_workload, run_train

from fulltilt.config import config_from_values, plan_of
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.loop import promise as promise_module
from fulltilt.engine.loop.promise import N_SLOW_WINDOWS, WINDOW_S, Look, MachineLook, PromiseWatch, find_reasons
from fulltilt.engine.ranks.world import ALONE, World
from fulltilt.engine.step.data_waits import DataWaits
from fulltilt.hardware import CpuTimes, NvmlDevice, NvmlProcess, ProcessCpu, read_machine, read_pressure
from fulltilt.levers import compute_plan_digest
from fulltilt.records import Noted, TrialRequest, WorkloadSource
from fulltilt.records.promise import Promise, write_promise
from fulltilt.tuner.answer.apply import MEASURED_ON
from fulltilt.tuner.trials.kinds import run_facts

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PROMISE = Promise(samples_per_s=(900.0, 1100.0), plan="p", machine="m", threads=4, data_wait_pct=5.0)


def build_watch(**changes):
    return PromiseWatch(dataclasses.replace(PROMISE, **changes), lambda: Look(time_s=0.0))


def feed(watch, rates, seconds=WINDOW_S):
    return [watch.observe(round(rate * seconds), seconds) for rate in rates]


@pytest.mark.parametrize("rates", [[1000, 900, 1100, 2000, 870], [1, 1000, 1000, 1000], [1000, *[500, 500, 1000] * 4]])
def test_a_promise_that_is_kept_a_slow_warm_up_and_single_slow_windows_say_nothing(rates):
    assert not any(feed(build_watch(), rates))


def test_several_slow_windows_in_a_row_are_told_once_per_fall():
    watch = build_watch()
    said = feed(watch, [1000, *[500] * (N_SLOW_WINDOWS + 3)])
    assert [message is not None for message in said] == [False] * N_SLOW_WINDOWS + [True, False, False, False]
    words = "500 samples/s, tune measured 900 to 1,100 for this plan on this machine: nothing that was looked at"
    assert words in said[N_SLOW_WINDOWS]
    short = feed(watch, [1000] * 20 + [500] * 20 * (N_SLOW_WINDOWS + 1), seconds=WINDOW_S / 20)
    assert sum(message is not None for message in short) == 1, "short intervals are put together"
    busy = feed(build_watch(cpu_pressure_pct=98.0), [1000, *[500] * N_SLOW_WINDOWS])[-1]
    assert "on this machine, busy then (some task waited for a core 98 % of the time): " in busy


SECONDS = 10.0


def look(*, time_s=SECONDS, steal_s=0.0, foreign_s=0.0, own_s=10.0, wait_pct=0.0, **changes):
    """What is seen of four cores of which this run kept one busy; nothing else is short."""
    seconds = {"steal": steal_s, "total": 4 * time_s, "idle": 4 * time_s - own_s - foreign_s - steal_s}
    times = CpuTimes(**{f"{name}_jiffies": round(value * TICKS_PER_S) for name, value in seconds.items()})
    values = {"cpu_times": times, "own_cpu_s": own_s, "cpu_wait_us": round(wait_pct * SECONDS * 1e4)}
    values |= {"disk_wait_us": 0, "memory_wait_us": 0, "n_threads": 4}
    return Look(time_s=time_s, **values | changes)


QUIET = look(time_s=0.0, own_s=0.0)


REASONS = {
    "neighbour": (look(foreign_s=19.0, wait_pct=40), "other processes use 1.9 cores, and some task waited .* 40 %"),
    "steal": (look(steal_s=12.0), "the host took 30 % of the cores' time"),
    "disk": (look(disk_wait_us=3_000_000), "waited for the disk 30 % of the time"),
    "memory": (look(memory_wait_us=2_000_000), r"waited for memory \(is it swapping\?\) 20 %"),
    "workers": (look(n_workers=4, stopped_workers=(77,)), r"1 of 4 data workers stand still \(pid 77\)"),
    "data": (look(data_wait_s=6.0), "waited for data 60 % of the time, 5 % when tuned"),
    "threads": (look(n_threads=1), "torch uses 1 threads, 4 when tuned"),
    "clock": (
        look(throttle_reasons=("gpu_idle", "sw_thermal_slowdown"), sm_clock_mhz=900, sm_clock_max_mhz=1980),
        r"holds its clock down \(sw_thermal_slowdown, 900 of 1980 MHz\)",
    ),
    "GPU neighbours": (look(n_gpu_neighbours=2), "2 other processes use the GPU"),
}


@pytest.mark.parametrize("name", REASONS)
def test_each_reason_is_named_alone(name):
    now, expected = REASONS[name]
    (reason,) = find_reasons(PROMISE, QUIET, now)
    assert re.search(expected, reason)


@pytest.mark.parametrize(
    "now",
    [
        look(),
        look(foreign_s=19.0, wait_pct=2),  # others are busy, and there is room for all
        look(wait_pct=60, own_s=38.0),  # the run's own workers wait for each other
        look(data_wait_s=1.2),
        look(throttle_reasons=("gpu_idle",)),
        Look(time_s=SECONDS),  # the machine does not say
    ],
)
def test_what_is_no_reason_is_not_named(now):
    assert find_reasons(PROMISE, QUIET, now) == []


def test_a_gpu_is_asked_for_its_clock_and_its_other_processes(monkeypatch):
    device = NvmlDevice(index=0, name="x", uuid="GPU-a", memory_total_bytes=None, compute_capability=None)
    processes = (NvmlProcess(pid=os.getpid(), memory_used_bytes=1), NvmlProcess(pid=1, memory_used_bytes=1))
    status = build_status(throttle_reasons=("hw_slowdown",), sm_clock_mhz=300, processes=processes)
    monkeypatch.setattr(promise_module, "find_device_index", lambda device, nvml: 0)
    look = MachineLook(torch.device("cuda:0"), DataWaits(), FakeNvml([device], {0: status}))()
    assert (look.throttle_reasons, look.sm_clock_mhz, look.n_gpu_neighbours) == (("hw_slowdown",), 300, 1)


def test_time_in_next_is_counted_and_nothing_else():
    clock = DataWaits()
    began_s = time.perf_counter()
    batches = clock.count(time.sleep(0.01) or i for i in range(3))
    assert [next(batches), next(batches)] == [0, 1]
    time.sleep(0.05)
    assert list(batches) == [2]
    assert 0.03 <= clock.seconds < time.perf_counter() - began_s - 0.04


def promise_for_this(folder, **changes):
    """A configuration with a promise that no machine can keep."""
    values = {"plan": compute_plan_digest(plan_of(build_config())), "machine": read_machine().hostname_hash, **changes}
    return build_config(run__promise=str(write_promise(folder, Promise(samples_per_s=(1e9, 2e9), **values))))


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
    result, recorder = run_train(tmp_path / "run", promise_for_this(tmp_path, **changes))
    (said,) = [note for note in result.notes if "not held against this run" in note]
    assert expected in said
    assert recorder.list_notes("tune measured") == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name"),
        ("{}", "samples_per_s"),
        ('{"samples_per_s": null, "plan": "a", "machine": "b"}', "samples_per_s is None (NoneType), expected a list"),
        ('{"samples_per_s": [9, 2], "plan": "a", "machine": "b"}', "samples_per_s is 9.0 to 2.0"),
    ],
)
def test_a_promise_that_cannot_be_read_is_a_note(tmp_path, content, why):
    file = tmp_path / "promise.json"
    if content is not None:
        file.write_text(content)
    result, _ = run_train(tmp_path / "run", build_config(run__promise=str(file)))
    (said,) = [note for note in result.notes if "run.promise" in note]
    assert said.startswith(f"run.promise names {file}, which cannot be read (")
    assert why in said
    assert "this run is not held to the speed it was tuned for; fulltilt tune --apply writes a new one" in said


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_run_is_held_to_a_promise_that_was_made_of_the_same_things(tmp_path, is_busy):
    """What the tuner's probe says of a workload is what a training run of it finds."""
    values = {"task": "training_cases:build_workload", "data": {"batch_size": 16}}
    config = config_from_values(values, base_dir=str(Path(__file__).parent))
    plan = plan_of(config)
    source = WorkloadSource(config=config.to_values(), base_dir=config.base_dir)
    answers = []
    run_facts(TrialRequest(id="facts", source=source, plan=plan, device="cpu", n_steps=1), answers.append)
    measured = {key: answers[-1]["workload"][name] for key, name in MEASURED_ON.items()}
    assert measured["data"] == "Points, 90 samples"
    made = {"plan": compute_plan_digest(plan), "machine": read_machine().hostname_hash, **measured}
    promise = Promise(samples_per_s=(1.0, 2.0), **made, cpu_pressure_pct=98.0 if is_busy else None)
    file = os.path.relpath(write_promise(tmp_path, promise), config.base_dir)
    promised = config_from_values({**values, "run": {"promise": file}}, base_dir=config.base_dir)
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
    spoken = []

    def stop(event):
        if isinstance(event, Noted) and "tune measured" in event.message:
            spoken.append(event.message)
            signal.raise_signal(signal.SIGINT)

    workload = build_workload(dataset=dataset, validation=None)
    with pytest.raises(KeyboardInterrupt):
        run_train(
            folder / "run", promise_for_this(folder, **promised), listeners=[stop], workload=workload, epochs=100_000
        )
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


def test_data_that_became_slow_and_another_number_of_threads_are_named(tmp_path, monkeypatch):
    class SlowPoints(Points):
        def __getitem__(self, index):
            time.sleep(0.002)
            return super().__getitem__(index)

    monkeypatch.setattr(promise_module, "WINDOW_S", 0.3)
    n_threads = torch.get_num_threads()
    said = find_what_a_run_says(tmp_path, lambda: SlowPoints(noise=0), data_wait_pct=5.0, threads=n_threads + 6)
    assert f"torch uses {n_threads} threads, {n_threads + 6} when tuned" in said
    found = re.search(r"the loop waited for data (\d+) % of the time, 5 % when tuned", said)
    assert found, said
    assert 20 < int(found[1]) <= 100


@pytest.mark.parametrize(("promised", "n_ranks"), [(1, 2), (2, 1)])
def test_a_promise_is_held_against_as_many_processes_as_it_was_measured_with(tmp_path, promised, n_ranks):
    with build_cpu_run(promise_for_this(tmp_path, n_ranks=promised)) as run:
        run.world = World(n_ranks=n_ranks)
        watch, note = promise_module.build_watch(run)
        assert watch is None
        assert f"measured with run.n_ranks {promised}, and this run has {n_ranks}" in note
        run.world = World(n_ranks=promised)
        assert isinstance(promise_module.build_watch(run)[0], PromiseWatch)
        run.world = ALONE


def test_the_cores_that_other_ranks_use_are_the_runs_own(monkeypatch):
    """all ranks are children of the process that started them"""
    used = {pid: ProcessCpu(cpu_s=s, n_children=0, stopped=()) for pid, s in ((os.getpid(), 1.0), (os.getppid(), 9.0))}
    monkeypatch.setattr(promise_module, "read_process_tree_cpu", used.get)
    looks = [MachineLook(torch.device("cpu"), DataWaits(), n_ranks=n) for n in (1, 2)]
    assert [look().own_cpu_s for look in looks] == [1.0, 9.0]
