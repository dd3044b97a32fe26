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


@pytest.fixture
def train_here(tmp_path, monkeypatch, capsys):
    """Train the digits for one epoch where no folder is named; what was said."""
    pytest.importorskip("sklearn")
    config = Path("configs/digits.yaml").resolve()
    monkeypatch.chdir(tmp_path)

    def run(*words, expect=0):
        code = run_command(["train", str(config), "run.epochs=1", "run.device=cpu", *words])
        said = capsys.readouterr()
        assert code == expect, said.err
        return said.out + said.err

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


def test_an_attempt_of_the_lab_names_no_folder_in_its_log_that_the_lab_removes(train, monkeypatch, capsys):
    monkeypatch.setenv("FULLTILT_ATTEMPT", "e1/1/mark")
    assert train("--epochs", "1", "data.batch_size=256") == 0
    assert re.fullmatch(r"Finished: .*", capsys.readouterr().out.splitlines()[-1])


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
        (["--metrics", __file__], ["--metrics: ", "test_cli_train.py is no folder, and one is needed; name a folder"]),
        (["run.loggers=[csv, mlfow]"], ["run.loggers", "mlflow"]),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(train, tmp_path, capsys, words, said):
    assert train(*words) == 2
    told = capsys.readouterr().err
    assert all(part in told for part in said)
    assert not (tmp_path / "run").exists()


OWN_CODE = """
import os, torch
from torch import nn
from torch.utils.data import Dataset
import fulltilt

class Points(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.ones(3), index % 2

class Bad(Points):
    def __getitem__(self, index):
        if index == 37: raise ValueError("no such pixel")
        return super().__getitem__(index)

class Elsewhere(Points):
    def __getitem__(self, index):
        os.chdir("/")
        return super().__getitem__(index)

class Loss(nn.CrossEntropyLoss):
    n_seen = 0
    def forward(self, outputs, targets):
        self.n_seen += 1
        return super().forward(outputs, targets) / (0 if self.n_seen == 2 else 1)

class Stuck(torch.optim.SGD):
    def step(self): raise RuntimeError("no step today")

def build(dataset, loss, **parts):
    return fulltilt.Workload(model=lambda: nn.Linear(3, 2), dataset=dataset, loss=loss, **parts)
bad, diverging = build(Bad, nn.CrossEntropyLoss()), build(Points, Loss())
narrow = fulltilt.Workload(model=lambda: nn.Sequential(nn.Linear(4, 2)), dataset=Points, loss=nn.CrossEntropyLoss())
elsewhere = build(Elsewhere, nn.CrossEntropyLoss())
stuck = build(Points, nn.CrossEntropyLoss(), optimizer=lambda parameters: Stuck(parameters, lr=1.0))
def stored(path): return build(Points, nn.CrossEntropyLoss())

class Frail(nn.Linear):
    def forward(self, inputs): return super().forward(inputs) / (1 if self.training else 0)
frail = fulltilt.Workload(model=lambda: Frail(3, 2), dataset=Points, loss=nn.CrossEntropyLoss(), validation=Points)
"""


@pytest.fixture
def train_own(tmp_path, monkeypatch):
    (tmp_path / "train_own_code.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "train_own_code", raising=False)
    return lambda name, *words: run_command(["train", f"train_own_code:{name}", "--device", "cpu", *words])


@pytest.mark.parametrize("n_workers", [0, 1])
def test_a_data_set_that_raises_is_one_line_and_nothing_else(train_own, capsys, n_workers):
    assert train_own("bad", f"data.num_workers={n_workers}") == 2
    said = capsys.readouterr()
    assert re.fullmatch(
        r"fulltilt train: sample 37 of Bad cannot be read: ValueError: no such pixel \(\S+/train_own_code\.py:13\); "
        r"data\.on_bad_sample=skip\(limit=100\) leaves such samples out "
        r"\(log: runs/train/train_own_code_bad/traceback\.log\)\n",
        said.err,
    )
    assert "no such pixel" not in said.out


def test_an_error_of_the_users_code_is_one_line_of_train_and_of_check(train_own, capsys):
    """It was 33 lines of the one, and no line of the code from the other."""
    words = "train_own_code.py:28 in step: RuntimeError: no step today"
    assert train_own("stuck") == 1
    log = Path("runs/train/train_own_code_stuck/traceback.log")
    assert capsys.readouterr().err == f"fulltilt train: {words} (log: {log})\n"
    assert 'raise RuntimeError("no step today")' in log.read_text()
    assert run_command(["check", "train_own_code:stuck", "--device", "cpu"]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert f"problem one step: {words} (log: " in told


def test_a_layer_that_does_not_fit_is_one_line_with_what_it_is(train_own, capsys):
    """It was 44 lines: no line of the user's own was in them."""
    assert train_own("narrow") == 2
    assert re.fullmatch(
        r"fulltilt train: \d+ features meet weights for 4 \(in Linear\(in_features=4, out_features=2, .*"
        r" \(log: runs/train/train_own_code_narrow/traceback\.log\)\n",
        capsys.readouterr().err,
    )


def test_a_loss_that_is_not_finite_is_told_once_and_with_its_step(train_own, capsys):
    """It was told after the interval in which it was read, and twice."""
    assert train_own("diverging", "data.batch_size=4") == 1
    said = capsys.readouterr()
    assert re.search("^failed after 2 steps, .* s$", said.out, re.MULTILINE)
    assert (said.out.count("the loss is"), said.err.count("the loss is nan in step 2 ")) == (0, 1)


def test_code_that_changes_the_working_folder_leaves_the_files_where_they_were_asked_for(train_own, tmp_path, capsys):
    """The checkpoint went to the root of the file system, or nowhere."""
    assert train_own("elsewhere", "--epochs", "1", "--json", "result.json") == 0
    assert "files: runs/train/train_own_code_elsewhere\n" in capsys.readouterr().out
    kept = {path.name for path in (tmp_path / "runs/train/train_own_code_elsewhere").iterdir()}
    assert {"checkpoint.pt", "events.jsonl", "report.html"} <= kept
    assert (tmp_path / "result.json").is_file()


def test_a_validation_loss_that_is_not_finite_is_warned_of_and_said_last(train_own, capsys):
    """It ended as "Finished: loss nan", and nothing else said so."""
    assert train_own("frail", "--epochs", "2", "--quiet") == 0
    said = capsys.readouterr()
    assert said.out.startswith("Finished, but the validation loss is nan: loss nan after ")
    assert said.err.count("the validation loss is nan; look for") == 1


def test_files_of_others_are_not_written_over(train_own, tmp_path, capsys):
    (tmp_path / "report.html").write_text("mine")
    before = sorted(path.name for path in tmp_path.iterdir())
    assert train_own("elsewhere", "--out", ".") == 2
    assert " holds report.html of another origin, and a run writes there; give another" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == before
    assert (tmp_path / "report.html").read_text() == "mine"


def test_a_training_whose_json_cannot_be_written_is_told_as_done_with_its_report(train_own, tmp_path, capsys):
    """It ended as a failure, without its result and its page."""
    assert train_own("elsewhere", "--epochs", "1", "--json", "/dev/full") == 1
    said = capsys.readouterr()
    assert "Finished: " in said.out
    assert "no space left for /dev/full; free some" in said.err
    assert (tmp_path / "runs/train/train_own_code_elsewhere/report.html").is_file()


def test_one_step_is_no_steps(train_own, capsys):
    assert train_own("diverging", "data.batch_size=64", "--epochs", "1", "--quiet") == 0
    assert " after 1 step, " in capsys.readouterr().out


def test_a_path_that_a_workload_does_not_take_is_refused(train_own, capsys):
    folder = Path("runs/train/train_own_code_bad")
    assert train_own("bad", "--data-path", ".") == 2
    assert "train_own_code:bad takes no path; make it a function that does" in capsys.readouterr().err
    assert not folder.exists(), "it was left behind, empty"
    folder.mkdir()
    (folder / "fingerprint.json").write_text("{broken")
    (folder / "checkpoint.pt").touch()
    assert train_own("bad", "--data-path", ".") == 2
    assert capsys.readouterr().out == "", "a second folder was said to be its place"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


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


def test_a_run_that_is_over_or_another_one_begins_in_a_folder_of_its_own(train_here, capsys):
    assert "files: runs/train/digits\n" in train_here()
    said = train_here()
    assert "runs/train/digits holds this run already: this one is in runs/train/digits-2\n" in said
    assert "files: runs/train/digits-2\n" in said
    said = train_here("lr=0.01")
    assert re.search(r"digits holds another run \(changed: optim.lr .* → 0.01\): this one is in .*/digits-3\n", said)
    said = train_here("--epochs", "2", "--resume")
    assert "files: runs/train/digits-2\n" in said, "the newest that matches"
    assert "46 steps" in said
    (Path("runs/train/digits-3") / "events.jsonl").unlink()
    assert "go on with --resume" in train_here("lr=0.01", expect=2), "it may have been interrupted"
    assert "holds the results of another run (changed: optim.lr" in train_here("lr=0.1", "--resume", expect=2)


@pytest.mark.parametrize(("end", "code"), [("interrupted", 0), (None, 0), ("failed: no more", 2)])
def test_the_same_command_goes_on_with_a_run_that_was_interrupted_and_not_with_one_that_failed(train_here, end, code):
    """It was refused after a Ctrl-C, too."""
    train_here()
    events = Path("runs/train/digits/events.jsonl")
    *lines, last = events.read_text().splitlines()
    events.write_text("\n".join([*lines, *([] if end is None else [last.replace("finished", end)]), ""]))
    said = train_here(expect=code)
    assert ("nothing is left to train" in said, "go on with --resume" in said) == (code == 0, code == 2)
    assert [path.name for path in Path("runs/train").iterdir()] == ["digits"]


def test_other_data_are_another_run_and_a_run_that_is_resumed_may_find_its_data_moved(train_own, capsys):
    """It was told to go on with --resume, on the data of another one."""

    def say(path, *words, expect=0):
        assert train_own("stored", "--data-path", path, "run.epochs=1", *words) == expect
        said = capsys.readouterr()
        return said.out + said.err

    first = Path("runs/train/train_own_code_stored")
    assert f"files: {first}\n" in say("a.h5")
    (first / "events.jsonl").unlink()  # as if it had been interrupted
    assert "go on with --resume" in say("a.h5", expect=2)
    said = say("b.h5")
    assert re.search(rf"{first} holds another run \(changed: data.path .*a.h5 → .*b.h5\): this one is in", said)
    assert f"files: {first}-2\n" in said
    assert f"files: {first}\n" in say("a.h5", "--resume"), "the one of these data, not the newest"
    assert "nothing is left to train" in say("moved.h5", "--resume")


def test_data_that_are_not_there_are_told_before_a_full_folder(train, capsys):
    assert train("--epochs", "1", "--quiet") == 0
    assert train("data.dataset=image_folder", "--data-path", "nowhere", "model=small_cnn") != 0
    said = capsys.readouterr().err
    assert ("nowhere" in said, "holds the results" in said) == (True, False)
