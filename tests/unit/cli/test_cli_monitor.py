"""``fulltilt monitor``: what a GPU and a machine do, as a table, a line and JSON."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from tests.fake_nvml import FakeNvml, build_status

from fulltilt.cli import run_command
from fulltilt.hardware import NvmlDevice
from fulltilt.hardware.nvml import NvmlProcess
from fulltilt.hardware.sampler import Sampler
from fulltilt.records import format_bytes
from fulltilt.report.readings import build_entry, build_table, describe

GIB = 1 << 30
MEMORY = f"{format_bytes(70 * GIB)} of {format_bytes(140 * GIB)}"
DEVICE = NvmlDevice(index=0, name="H200", uuid="GPU-0", memory_total_bytes=140 * GIB, compute_capability=(9, 0))
BUSY = build_status(
    memory_used_bytes=70 * GIB, utilization_pct=87.0, power_w=611.4, power_limit_w=700.0, temperature_c=61,
    sm_clock_mhz=1755, sm_clock_max_mhz=1980, throttle_reasons=("sw_power_cap",),
    processes=tuple(NvmlProcess(pid=pid, memory_used_bytes=pid * GIB) for pid in (1, 2, 3, 4)),
)  # fmt: skip


@pytest.fixture
def root(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "stat").write_text("cpu  100 0 0 900 0 0 0 0\n")
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 8388608 kB\nMemAvailable: 2097152 kB\n")
    return tmp_path


def show(table) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_a_gpu_is_shown_with_what_slows_it_and_who_is_on_it(root):
    sampler = Sampler(FakeNvml([DEVICE], {0: BUSY}), root=root)
    (root / "proc" / "stat").write_text("cpu  175 0 0 925 0 0 0 0\n")
    sample = sampler.read()
    text = show(build_table(sample))
    for said in ("87 %", MEMORY, "611 of 700 W", "61 °C", "1755 of 1980 MHz", "sw_power_cap", "1 more"):
        assert said in text
    assert ", ".join(f"{pid} {format_bytes(pid * GIB)}" for pid in (4, 3, 2)) in text, "the largest first"
    assert "cores 75 %" in text
    assert f"memory {format_bytes(6 * GIB)} of {format_bytes(8 * GIB)}" in text
    assert f"gpu 0: 87 %, {MEMORY}, 611 of 700 W" in describe(sample)
    entry = json.loads(json.dumps(build_entry(sample)))
    assert (entry["cpu_pct"], entry["gpus"][0]["power_w"]) == (75.0, 611.4)


def test_what_a_sensor_does_not_say_is_a_dash_and_no_zero(root):
    sample = Sampler(FakeNvml([DEVICE]), root=root).read()
    row = show(build_table(sample)).splitlines()[1]
    assert row.split("H200")[1].split() == ["–"] * 7
    assert sample.cpu_pct is None


def test_without_a_gpu_the_machine_is_watched_all_the_same(capsys):
    assert run_command(["monitor", "--once", "--interval", "0.1"]) == 0
    line = capsys.readouterr().out
    assert "cores" in line
    assert "memory" in line
    assert run_command(["monitor", "--once", "--json", "--interval", "0.1"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_total_bytes"] > 0
    assert run_command(["monitor", "--interval", "nan"]) == 2
    assert "--interval nan must be 0.1 or more" in capsys.readouterr().err
