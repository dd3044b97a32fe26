"""``fulltilt train`` and the loggers it is asked for; the page it leaves behind."""

import re

import pytest

from fulltilt.cli import run_command


def train(tmp_path, *words):
    command = ["train", "configs/digits.yaml", "run.epochs=1", "run.device=cpu", "--quiet"]
    return run_command([*command, "data.batch_size=256", "--out", str(tmp_path / "run"), *words])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_flag_adds_to_what_the_configuration_names(tmp_path, capsys):
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    assert train(tmp_path, "run.loggers=[]", "--tensorboard") == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"tensorboard", "events.jsonl", "report.html"} <= names
    assert not names & {"steps.csv", "epochs.csv"}
    html = (tmp_path / "run" / "report.html").read_text()
    told = re.search(r"accuracy ([\d.]+)", capsys.readouterr().out).group(1)
    assert f"<td>{told}</td>" in html, "the page and the last line say the same"


def test_a_logger_that_there_is_not_is_named_before_anything_starts(tmp_path, capsys):
    assert train(tmp_path, "run.loggers=[csv, mlfow]") == 2
    said = capsys.readouterr().err
    assert "run.loggers" in said
    assert "mlflow" in said
    assert not (tmp_path / "run").exists()
