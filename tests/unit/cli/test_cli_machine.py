"""What ``fulltilt check`` and ``fulltilt machine`` say first, under a memory limit and under Windows' Linux."""

import dataclasses
import json
import re

import pytest

from fulltilt.cli import run_command
from fulltilt.cli.check import describe_readiness
from fulltilt.cli.machine import describe_machine, list_wsl_rows
from fulltilt.engine.check.checklist import CheckItem
from fulltilt.hardware import WslReport, read_machine
from fulltilt.records import Device


@pytest.mark.parametrize(
    ("limit", "verdict", "code", "said"),
    [
        ("64GiB", "ok", 0, "Ready: all 11 checks pass."),
        ("100KiB", "problem", 3, "Not ready: 1 of 9 checks fails: memory limit."),
    ],
)
def test_a_step_that_does_not_fit_the_memory_limit_ends_with_another_exit_code(
    tmp_path, capsys, limit, verdict, code, said
):
    document = tmp_path / "check.json"
    words = ["check", "configs/digits.yaml", "device=cpu", "--out", str(tmp_path / "runs"), "--json", str(document)]
    assert run_command([*words, "--memory-limit", limit]) == code
    items = {item["name"]: item for item in json.loads(document.read_text())["items"]}
    assert items["memory limit"]["verdict"] == verdict
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[1].split()[0]) == (said, verdict), "the answer, and first what stands against it"
    assert_one_screen(lines)


def assert_one_screen(lines):
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        ("ok ok", "Ready: all 2 checks pass."),
        ("note ok note", "Ready: no check fails; there are notes on c0, c2."),
        ("note problem problem", "Not ready: 2 of 3 checks fail: c1, c2."),
    ],
)
def test_one_sentence_says_whether_the_run_can_start(verdicts, said):
    items = [CheckItem(f"c{n}", verdict, "a text") for n, verdict in enumerate(verdicts.split())]
    assert describe_readiness(items) == said


@pytest.mark.parametrize(("flags", "is_whole"), [([], False), (["--verbose"], True)])
def test_a_long_error_leaves_the_answer_on_the_screen(monkeypatch, capsys, flags, is_whole):
    item = CheckItem("build", "problem", "RuntimeError: " + "a key is missing\n" * 200)
    monkeypatch.setattr("fulltilt.engine.check.checklist.run_checks", lambda *_, **__: [item])
    assert run_command(["check", "configs/digits.yaml", "device=cpu", *flags]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Not ready: 1 of 1 checks fails: build."
    assert (" ".join(lines).count("missing") == 200, len(lines) <= 24) == (is_whole, not is_whole)


def test_the_machine_is_told_in_one_sentence_before_its_table(capsys):
    assert run_command(["machine", "--no-roofs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"This machine has .*, \d+ usable cores? \(.+\) and .+ of memory\.", lines[0])
    assert_one_screen(lines)
    machine = dataclasses.replace(read_machine(), devices=(Device(name="NVIDIA H100", type="cuda"),) * 2)
    assert describe_machine(machine).startswith("This machine has 2 × NVIDIA H100 GPU, ")


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
