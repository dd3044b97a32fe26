"""``fulltilt init`` and ``fulltilt completion``: what is written, and what a shell completes."""

import errno
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from fulltilt.cli import COMMANDS, run_command
from fulltilt.cli.init import EXAMPLES, list_examples
from fulltilt.config import load_config, load_points, parse_call

CODE = """import fulltilt, torch
from torch import nn
from torch.utils.data import TensorDataset

def build(inputs, **more):
    targets = torch.zeros(len(inputs), dtype=torch.long)
    data = lambda: TensorDataset(inputs, targets)
    return fulltilt.Workload(model=lambda: nn.Linear(4, 2), dataset=data, loss=nn.CrossEntropyLoss(), **more)

plain = build(torch.ones(50, 4))
own = build(torch.ones(50, 4), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.25))

def stored(path):
    return build(torch.load(path))

def noted(note="", path=None):
    return build(torch.ones(len(note), 4))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "init_user_code", raising=False)
    (tmp_path / "init_user_code.py").write_text(CODE)
    torch.save(torch.ones(40, 4), tmp_path / "rows.pt")
    return tmp_path


@pytest.mark.parametrize("name", list_examples())
def test_every_example_loads_beside_its_data_and_names_no_file_of_a_clone(folder, name, capsys):
    assert run_command(["init", name, "--out", "conf.yaml"]) == 0
    text = (folder / "conf.yaml").read_text()
    assert not re.search(r"configs/|scripts/|\.\./|python train\.py", text)
    said = capsys.readouterr().out
    assert said.startswith("conf.yaml is written. Next: fulltilt ")
    command = said.partition("Next: ")[2].strip()
    assert command in text
    assert {*re.findall(r"\S+\.yaml", command)} == {"conf.yaml"}, "no other file is there"
    (_, config), *_ = load_points("conf.yaml")
    (_, original), *_ = load_points(EXAMPLES / f"{name}.yaml")
    changed = {key for key, value in config.to_values().items() if value != original.to_values()[key]}
    assert changed <= {"data"}, "the place of the data alone"


@pytest.mark.parametrize(
    ("source", "words", "said", "settings"),
    [
        ("plain", [], "50 samples, 10 parameters, no validation set", {"optimizer: adamw", "batch_size: 32"}),
        ("own", [], "# The optimizer is the code's own: SGD, lr 0.25.", {"schedule: constant", "epochs: "}),
        ("stored", ["--data-path", "rows.pt"], "40 samples", {"path: ", "rows.pt"}),
    ],
)
def test_a_workload_of_the_users_own_is_described_and_the_file_is_ready_to_check(
    folder, source, words, said, settings, capsys
):
    assert run_command(["init", f"init_user_code:{source}", *words]) == 0
    assert capsys.readouterr().out == (
        f"init_user_code_{source}.yaml is written. Next: fulltilt check init_user_code_{source}.yaml\n"
    )
    text = (folder / f"init_user_code_{source}.yaml").read_text()
    assert said in text
    assert all(setting in text for setting in settings)
    assert ("optimizer:" in text) == (source != "own")
    assert run_command(["check", f"init_user_code_{source}.yaml", "device=cpu"]) == 0
    assert load_config(f"init_user_code_{source}.yaml").run_name == f"init_user_code_{source}"


def test_code_that_changes_the_working_folder_has_its_file_where_it_was_asked_for(folder, capsys):
    (folder / "moving.py").write_text(f"import os\n{CODE}\nos.makedirs('other'); os.chdir('other')\n")
    assert run_command(["init", "moving:plain"]) == 0
    assert (folder / "moving_plain.yaml").is_file()


@pytest.mark.parametrize("note", ["a: b", "x #1", '"한국", {y}'])
@pytest.mark.parametrize("name", ["my conf.yaml", "한국.yaml"])
def test_what_yaml_or_a_shell_would_read_as_something_else_is_quoted(folder, note, name, capsys):
    call = f"init_user_code:noted(note='{note}')"
    assert run_command(["init", call, "--data-path", "두 줄: #1 😀", "--out", name]) == 0
    *_, command = capsys.readouterr().out.strip().partition("Next: fulltilt ")
    assert shlex.split(command) == ["check", name]
    config = load_config(name)
    assert str(parse_call(config.task)) == str(parse_call(call))
    assert config.data.path == str(folder / "두 줄: #1 😀")
    assert "두 줄" in (folder / name).read_text("utf-8")
    assert f"{len(note)} samples" in (folder / name).read_text("utf-8")


def test_names_of_any_script_are_names(folder, capsys):
    """Python takes them, and so do the readers of the guides."""
    (folder / "모듈.py").write_text("from init_user_code import plain as 일감\n")
    assert run_command(["init", "모듈:일감"]) == 0
    assert capsys.readouterr().out == "모듈_일감.yaml is written. Next: fulltilt check '모듈_일감.yaml'\n"
    assert run_command(["check", "모듈_일감.yaml", "device=cpu"]) == 0
    assert run_command(["init", "모듈:"]) == 2
    assert "command line: task: '모듈:': expected an object's name" in capsys.readouterr().err


def test_a_full_disk_leaves_no_half_of_a_configuration(folder, monkeypatch, capsys):
    def fill(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(folder.iterdir())
    monkeypatch.setattr(os, "fsync", fill)
    assert run_command(["init", "digits", "--out", "conf.yaml"]) == 1
    assert "no space left for" in capsys.readouterr().err
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["digit"], "no example is named digit; did you mean digits"),
        (["init_user_code"], "init_user_code.py is code: name an object in it, init_user_code:NAME"),
        (["init_user_code.py"], "init_user_code.py is code: name an object in it, init_user_code:NAME"),
        (["init_user_code.py:plain"], "command line: task: init_user_code.py is a file, and a module is named without"),
        (["init_user_code:nothing"], "init_user_code has no 'nothing'"),
        (["init_user_code:stored"], "init_user_code:stored takes a path, and none is given; name it with --data-path"),
        (["digits", "--data-path", "x"], "--data-path is for a Workload of yours"),
        (["digits", "--out", "rows.pt"], "rows.pt is there already; name another with --out"),
        (["digits", "--out", "rows.pt/a.yaml"], "cannot be written (File exists); name another place"),
    ],
)
def test_nothing_is_written_where_it_cannot_be(folder, words, said, capsys):
    before = {path: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    assert run_command(["init", *words]) in (1, 2)
    assert said in capsys.readouterr().err
    assert {path: path.stat().st_size for path in folder.iterdir() if path.is_file()} == before


def test_without_a_name_the_examples_are_listed(folder, capsys):
    assert run_command(["init"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in list_examples())
    assert "digits                    Handwritten digits" in said


def test_bash_completes_commands_flags_and_files(folder, capsys):
    assert run_command(["completion", "bash"]) == 0
    (folder / "complete.sh").write_text(capsys.readouterr().out)
    (folder / "mine.yaml").touch()

    def complete(*words):
        line = " ".join(f"'{word}'" for word in words)
        script = (
            f"source complete.sh; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
            '_shtab_fulltilt; echo "${COMPREPLY[@]}"'
        )
        return subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True).stdout.split()

    assert {*complete("fulltilt", "")} >= {*COMMANDS}
    assert "--budget" in complete("fulltilt", "tune", "--bu")
    assert "inspect" in complete("fulltilt", "data", "ins")
    assert "mine.yaml" in complete("fulltilt", "train", "mi")
    assert complete("fulltilt", "train", "--device", "c") == ["cuda", "cpu"]
    assert complete("fulltilt", "tune", "--budget", "") == []
    assert complete("fulltilt", "init", "ci") == ["cifar10"]


def test_the_help_says_how_each_shell_is_taught(capsys):
    with pytest.raises(SystemExit):
        run_command(["completion", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"{shell}: " in told for shell in ("bash", "zsh", "fish"))
