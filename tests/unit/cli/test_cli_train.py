"""``fulltilt train``: its profiles, the loggers it is asked for and the page it leaves behind."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from fulltilt.cli import run_command


@pytest.fixture
def train(tmp_path):
    """Run ``fulltilt train`` on the digits into ``run``."""
    pytest.importorskip("sklearn")

    def run(*words):
        return run_command(["train", "configs/digits.yaml", "run.device=cpu", "--out", str(tmp_path / "run"), *words])

    return run


def test_parts_of_the_data_path_are_told_and_nothing_is_trained(train, tmp_path, capsys):
    assert train("--profile-data", "--json", str(tmp_path / "data.json")) == 0
    profile = json.loads((tmp_path / "data.json").read_text())["profile"]
    assert profile["batch_size"] == 64
    told = capsys.readouterr().out
    assert all(part["name"] in told for part in profile["parts"])
    assert f"{profile['loader_samples_per_s']:,.0f} samples/s in one process" in told
    assert not (tmp_path / "run").exists()


def test_operators_of_steps_are_told_and_training_starts_in_the_folder_of_its_profile(train, tmp_path, capsys):
    assert train("--profile-steps", "2", "--json", "-") == 0
    streams = capsys.readouterr()
    profile = json.loads(streams.out)["profile"]
    assert (profile["n_steps"], profile["device"]) == (2, "cpu")
    assert profile["operators"][0]["name"] in streams.err
    assert [path.name for path in (tmp_path / "run").rglob("*.*")] == ["trace.json"]
    assert train("--epochs", "1") == 0
    assert (tmp_path / "run" / "checkpoint.pt").is_file()
    said = capsys.readouterr().out
    *_, sentence, files = said.splitlines()
    assert re.fullmatch(
        r"Finished: loss .*, accuracy .* after 23 steps, .+ of training at [\d,]+ samples/s\.", sentence
    )
    assert files == f"files: {tmp_path / 'run'}"
    assert said.lower().count("finished") == 1


@pytest.mark.parametrize(
    ("words", "folder"),
    [([], "results/metrics"), (["--out", "a"], "a/metrics"), (["--epochs", "1", "--out=b"], "b/metrics")],
)
def test_the_metrics_of_guide_004_follow_out(monkeypatch, words, folder):
    """a second run with another --out was refused: results/metrics held those of the first"""
    given = []
    monkeypatch.setattr("fulltilt.cli.main", given.extend)
    monkeypatch.setattr(sys, "argv", ["train_bilm.py", *words])
    runpy.run_path(str(Path(__file__).parents[3] / "scripts" / "train_bilm.py"))
    assert given == ["train", "--metrics", folder, *words]


def test_of_several_devices_the_first_takes_whole_batches_and_that_is_said(train, capsys):
    assert train("run.n_ranks=2", "--profile-steps", "1") == 0
    assert "training would divide them over 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile-steps", "0"], ["at least 1 is needed"]),
        (["run.loggers=[csv, mlfow]"], ["run.loggers", "mlflow"]),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(train, tmp_path, capsys, words, said):
    assert train(*words) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in said)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_flag_adds_to_what_the_configuration_names(train, tmp_path, capsys):
    pytest.importorskip("tensorboard")
    words = ["run.epochs=1", "data.batch_size=256", "run.loggers=[]"]
    assert train(*words, "--quiet", "--tensorboard") == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"tensorboard", "events.jsonl", "report.html"} <= names
    assert not names & {"steps.csv", "epochs.csv"}
    told = re.search(r"accuracy ([\d.]+)", capsys.readouterr().out).group(1)
    html = (tmp_path / "run" / "report.html").read_text()
    assert f"<td>{told}</td>" in html, "the page and the last line say the same"
