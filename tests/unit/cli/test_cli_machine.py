"""``fulltilt check`` under a memory limit, and what ``fulltilt machine`` says under Windows' Linux."""

import json

import pytest

from fulltilt.cli import run_command
from fulltilt.cli.machine import list_wsl_rows
from fulltilt.hardware import WslReport


@pytest.mark.parametrize(("limit", "verdict", "code"), [("64GiB", "ok", 0), ("100KiB", "problem", 3)])
def test_a_step_that_does_not_fit_the_memory_limit_ends_with_another_exit_code(tmp_path, limit, verdict, code):
    document = tmp_path / "check.json"
    words = ["check", "configs/digits.yaml", "device=cpu", "--out", str(tmp_path / "runs"), "--json", str(document)]
    assert run_command([*words, "--memory-limit", limit]) == code
    items = {item["name"]: item for item in json.loads(document.read_text())["items"]}
    assert items["memory limit"]["verdict"] == verdict


def test_memory_limits_gpu_and_advice_stand_in_rows_of_their_own_and_elsewhere_there_are_none():
    report = WslReport(
        version=2,
        memory_total_bytes=16 * 2**30,
        swap_total_bytes=4 * 2**30,
        config_path="/mnt/c/Users/kim/.wslconfig",
        config_memory="16GB",
        config_swap=None,
        gpu="there is no /dev/dxg",
        advice=("first", "second"),
    )
    assert list_wsl_rows(report) == [
        ("WSL 2", "16.00 GiB memory, 4.00 GiB swap; memory=16GB, swap=not set in /mnt/c/Users/kim/.wslconfig"),
        ("WSL: GPU", "not usable: there is no /dev/dxg"),
        ("WSL: advice", "first"),
        ("WSL: advice", "second"),
    ]
    assert list_wsl_rows(None) == []
