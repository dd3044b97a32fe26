"""Windows' Linux, from planted trees."""

import pytest

from fulltilt.hardware import FakeNvml, NvmlDevice, read_wsl

GIB = 2**30
KERNEL_2 = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@x)"
KERNEL_1 = "Linux version 4.4.0-22621-Microsoft (Microsoft@Microsoft.com)"
MEMORY = "MemTotal: 16777216 kB\nMemAvailable: 8000000 kB\nSwapTotal: 4194304 kB\n"
CARD = NvmlDevice(
    index=0, name="NVIDIA GeForce RTX 3060", uuid="GPU-a", memory_total_bytes=12 * GIB, compute_capability=(8, 6)
)
LIBRARY = {"dev/dxg": "", "usr/lib/wsl/lib/libcuda.so.1": ""}


def read(plant, files, nvml=None):
    root = plant({"proc/version": KERNEL_2, "proc/meminfo": MEMORY, **files})
    return read_wsl(nvml or FakeNvml([CARD]), root, environ={})


def test_elsewhere_there_is_no_report(recorded):
    assert read_wsl(FakeNvml(), recorded, environ={}) is None


def test_a_machine_set_up_well_gets_little_advice(plant):
    config = "[wsl2]\nmemory=20GB  # of 32\nswap = 8GB\n[experimental]\nmemory=1GB\n"
    report = read(plant, {**LIBRARY, "mnt/c/Users/kim/.wslconfig": config})
    assert (report.version, report.gpu) == (2, None)
    assert (report.config_memory, report.config_swap) == ("20GB", "8GB")
    assert (report.memory_total_bytes, report.swap_total_bytes) == (16 * GIB, 4 * GIB)
    assert not any(".wslconfig" in text for text in report.advice)
    assert any("page-locked memory is limited" in text for text in report.advice)


def test_without_a_limit_the_default_and_the_place_to_change_it_are_named(plant):
    (text,) = [text for text in read(plant, LIBRARY).advice if ".wslconfig" in text]
    assert "Linux sees 16.00 GiB, by default half of what Windows has" in text
    assert "wsl --shutdown" in text


def test_two_windows_users_leave_open_whose_file_counts(plant):
    files = {f"mnt/c/Users/{name}/.wslconfig": "[wsl2]\nmemory=4GB\n" for name in ("kim", "lee")}
    assert read(plant, {**LIBRARY, **files}).config_memory is None
    root = plant({})
    named = read_wsl(FakeNvml([CARD]), root, environ={"USERPROFILE": "C:\\Users\\lee"})
    assert named.config_path.endswith("lee/.wslconfig")


@pytest.mark.parametrize(
    ("files", "nvml", "expected"),
    [
        ({}, FakeNvml([CARD]), "there is no /dev/dxg"),
        ({"dev/dxg": ""}, FakeNvml([CARD]), "the Windows driver for NVIDIA is missing or too old"),
        (LIBRARY, FakeNvml(absence="driver not loaded"), "driver not loaded"),
    ],
)
def test_a_gpu_that_cannot_be_seen_comes_with_the_reason_and_the_remedy(plant, files, nvml, expected):
    report = read(plant, files, nvml)
    assert expected in report.gpu
    assert any("driver on Windows only" in text for text in report.advice)


def test_version_1_is_told_to_convert(plant):
    report = read(plant, {"proc/version": KERNEL_1})
    assert (report.version, report.gpu) == (1, "WSL 1 passes no GPU through")
    assert any("--set-version" in text for text in report.advice)
