import os

import pytest

from fulltilt.hardware import (
    CpuTimes,
    compute_steal_pct,
    count_usable_cores,
    has_c_compiler,
    read_cpu_model,
    read_cpu_times,
    read_memory_bytes,
    read_pressure,
)

PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"


def test_pressure_of_disk_and_memory_have_files_of_their_own(plant):
    root = plant({"proc/pressure/cpu": PSI.format(1), "proc/pressure/io": PSI.format(2)})
    assert read_pressure(root).some_total_us == 1
    assert read_pressure(root, "io").some_total_us == 2
    assert "/proc/pressure/memory" in read_pressure(root, "memory").reason


def test_recorded_machine(recorded):
    assert read_cpu_model(recorded) == "AMD EPYC"
    assert read_memory_bytes(recorded)[0] == 25276502016
    assert read_pressure(recorded).some_total_us == 17614843
    times = read_cpu_times(recorded)
    assert (times.steal_jiffies, times.total_jiffies) == (45, 17960 + 4326 + 8598 + 337473 + 872 + 0 + 91 + 45)


def test_absent_readings_are_none_with_a_reason_and_never_zero(tmp_path):
    pressure, times = read_pressure(tmp_path), read_cpu_times(tmp_path)
    assert pressure.some_total_us is None
    assert "PSI" in (pressure.reason or "")
    assert times.steal_jiffies is None
    assert times.total_jiffies is None
    assert times.reason
    assert read_cpu_model(tmp_path) is None


def test_guest_time_is_not_counted_twice(plant):
    root = plant({"proc/stat": "cpu  100 1 20 300 4 5 6 7 50 60\n"})
    assert read_cpu_times(root).total_jiffies == 100 + 1 + 20 + 300 + 4 + 5 + 6 + 7


@pytest.mark.parametrize("stat", ["", "cpu  1 2 3\n", "cpu0 1 2 3 4 5 6 7 8\n"])
def test_stat_of_another_shape_is_no_reading(plant, stat):
    assert read_cpu_times(plant({"proc/stat": stat})).total_jiffies is None


def test_steal_is_a_share_of_all_time_between_two_readings():
    before, after = CpuTimes(steal_jiffies=10, total_jiffies=1000), CpuTimes(steal_jiffies=30, total_jiffies=1400)
    assert compute_steal_pct(before, after) == 5.0
    assert compute_steal_pct(before, before) is None
    assert compute_steal_pct(before, CpuTimes(steal_jiffies=None, total_jiffies=None)) is None


@pytest.mark.parametrize(("quota", "n"), [("50000 100000", 1), ("250000 100000", 2), ("max 100000", 5)])
def test_affinity_and_quota_limit_the_cores_and_leave_at_least_one(plant, monkeypatch, quota, n):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4, 6, 7})
    root = plant(
        {
            "proc/self/cgroup": "0::/\n",
            "proc/self/mountinfo": "35 25 0:30 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
            "sys/fs/cgroup/cpu.max": f"{quota}\n",
        }
    )
    assert count_usable_cores(root) == n


def test_arm_processor_without_a_name_is_named_by_its_architecture(plant):
    root = plant({"proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\n"})
    assert read_cpu_model(root) == os.uname().machine


def test_c_compiler_is_looked_for_where_torch_looks(tmp_path):
    assert not has_c_compiler({"PATH": str(tmp_path)})
    compiler = tmp_path / "my-c++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert not has_c_compiler({"PATH": str(tmp_path)})
    assert has_c_compiler({"PATH": str(tmp_path), "CXX": "my-c++ -O2"})
    compiler.rename(tmp_path / "g++")
    assert has_c_compiler({"PATH": str(tmp_path)})
