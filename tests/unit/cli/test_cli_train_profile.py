"""``fulltilt train --profile-data`` and ``--profile-steps``: tables and JSON of a run that is not trained."""

import json

import pytest

from fulltilt.cli import run_command

pytest.importorskip("sklearn")
COMMAND = ["train", "configs/digits.yaml", "run.device=cpu"]


def test_parts_of_the_data_path_are_told_and_nothing_is_trained(tmp_path, capsys):
    out_dir = tmp_path / "run"
    assert run_command([*COMMAND, "--profile-data", "--out", str(out_dir), "--json", str(tmp_path / "data.json")]) == 0
    profile = json.loads((tmp_path / "data.json").read_text())["profile"]
    assert profile["batch_size"] == 64
    told = capsys.readouterr().out
    assert all(part["name"] in told for part in profile["parts"])
    assert f"{profile['loader_samples_per_s']:,.0f} samples/s in one process" in told
    assert not out_dir.exists()


def test_operators_of_steps_are_told_and_nothing_is_trained(tmp_path, capsys):
    out_dir = tmp_path / "run"
    assert run_command([*COMMAND, "--profile-steps", "2", "--out", str(out_dir), "--json", "-"]) == 0
    streams = capsys.readouterr()
    profile = json.loads(streams.out)["profile"]
    assert (profile["n_steps"], profile["device"]) == (2, "cpu")
    assert profile["operators"][0]["name"] in streams.err
    assert [path.name for path in out_dir.rglob("*.*")] == ["trace.json"]


def test_a_run_starts_in_the_folder_of_its_profile(tmp_path):
    words = [*COMMAND, "--epochs", "1", "--quiet", "--out", str(tmp_path)]
    assert run_command([*words, "--profile-steps", "1"]) == 0
    assert run_command(words) == 0
    assert (tmp_path / "checkpoint.pt").is_file()


def test_of_several_devices_the_first_takes_whole_batches_and_that_is_said(tmp_path, capsys):
    assert run_command([*COMMAND, "run.n_ranks=2", "--profile-steps", "1", "--out", str(tmp_path)]) == 0
    assert "training would divide them over 2" in capsys.readouterr().out


def test_no_steps_are_wrong_usage(tmp_path, capsys):
    assert run_command([*COMMAND, "--profile-steps", "0", "--out", str(tmp_path)]) == 2
    assert "at least 1 is needed" in capsys.readouterr().err
