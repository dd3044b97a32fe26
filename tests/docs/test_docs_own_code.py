"""The examples of docs/your-own-code.md run; the long ones run in tests/integration/test_integration_wheel.py."""

import dataclasses
import inspect
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fulltilt
from fulltilt.cli import run_command

TEXT = (Path(__file__).parents[2] / "docs" / "your-own-code.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# ([\w.]+)\n(.*?)```", TEXT, re.S))
COMMANDS = [shlex.split(line) for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
LONG = ("tune", "compare")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.partition(".")[0], raising=False)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.partition(".")[0], None)


def test_every_file_of_the_page_is_known():
    names = ["train.py", "my_module.py", "from_a_path.py", "my_net.py", "own_model.yaml", "search.py", "fits.py"]
    assert [*FILES] == names
    assert len(COMMANDS) == 8


def test_the_script_becomes_a_module_in_nine_lines_and_both_are_the_same_training(folder):
    script = runpy.run_path("train.py")
    module = runpy.run_path("my_module.py")["workload"]
    lines = {name: {line.strip() for line in FILES[name].splitlines() if line.strip()} for name in FILES}
    assert len(lines["my_module.py"] - lines["train.py"]) == 9
    assert str(module.model()) == str(script["model"])
    assert all(torch.equal(*both) for both in zip(module.dataset().tensors, script["dataset"].tensors, strict=True))
    assert module.optimizer(module.model().parameters()).defaults == script["optimizer"].defaults


@pytest.mark.parametrize("block", ["my_module", "from_a_path", "own_model"])
def test_the_commands_of_the_page_run(folder, block, capsys):
    torch.save((torch.randn(400, 20), torch.randint(2, (400,))), folder / "events.pt")
    commands = [words[1:] for words in COMMANDS if any(block in word for word in words) and words[1] not in LONG]
    assert commands
    for words in commands:
        assert run_command([*words]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert {"my_module": "Finished", "from_a_path": "Ready", "own_model": "Finished"}[block] in said


@pytest.mark.slow
def test_the_example_of_batches_that_fit_runs(folder):
    done = subprocess.run([sys.executable, "fits.py"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["512", "512"]


def test_the_page_has_every_field_of_a_workload_and_every_argument_of_tune():
    fields = re.findall(r"^\| `(\w+)` \|", TEXT, re.M)
    assert fields == [field.name for field in dataclasses.fields(fulltilt.Workload)]
    named = re.findall(r"`(\w+)`", re.search(r"flags of `fulltilt tune` as arguments: (.*?)\.\n", TEXT).group(1))
    assert sorted(named) == sorted({*inspect.signature(fulltilt.tune).parameters} - {"target", "on_event"})
