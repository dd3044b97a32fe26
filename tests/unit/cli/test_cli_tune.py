"""What ``fulltilt tune`` prints and refuses, without a search."""

import argparse
import dataclasses
import io
import json
import types
from pathlib import Path

import pytest
from rich.console import Console

from fulltilt.cli import build_parser, run_command, tune
from fulltilt.cli._shared import build_console
from fulltilt.cli.tune import _list_train_words, _name_doubt, print_result
from fulltilt.config import load_config, plan_of
from fulltilt.errors import ResultUnwrittenError, RunFolderError, StorageError
from fulltilt.levers import default_plan
from fulltilt.records.run_folder import RunFolder, hold_folder
from fulltilt.tuner.picks.recommend import LearningRate


def make_document(**changes):
    row = {
        "id": "t1", "plan": dict(default_plan({"batch_size": 64})), "status": "ok", "reason": None, "phases_ms": None,
        "samples_per_s": 100.0, "samples_per_s_ci95": [99.0, 101.0], "memory_reserved_peak_gib": None,
        "memory_rss_peak_gib": 0.5,
    }  # fmt: skip
    other = row | {"id": "t2", "samples_per_s": 95.0, "memory_rss_peak_gib": 0.2}
    pick = {"rule": "fastest", "tied_with": [], "changes": {}}
    picks = {"recommended": row | pick, "throughput": row | pick, "efficiency": None, "memory": other | pick}
    search = {"strategy": "exhaustive", "grid_size": 2, "n_trials": 2, "n_out_of_memory": 0, "seconds": 4.0}
    return {"trials": [row, other], "picks": picks, "search": search} | changes


def print_to_text(document):
    console = Console(file=io.StringIO(), width=160, highlight=False)
    print_result(console, document)
    return console.file.getvalue()


def test_all_picks_are_named_in_the_table_and_explained_under_it():
    said = print_to_text(make_document())
    assert "ok ← recommended, throughput" in said
    assert "ok ← memory" in said
    assert "Least memory at an acceptable speed\n  batch_size 64" in said
    assert said.index("What it comes to\n· ") < said.index("Recommended for training")
    assert "What would make it faster still" not in said


def test_savings_verdict_and_advice_are_printed():
    advice = {"bound": {"text": "[80 %] of the step"}, "roof": None, "ceilings": [], "levers": []}
    said = print_to_text(
        make_document(
            advice=advice,
            savings={"verdict": "same plan"},
            verification={"text": "learns as well: yes"},
            null_reasons={"advice.roof": "not measured"},
        )
    )
    assert "· no gain: the settings as they were are the recommended ones" in said
    assert "· learns as well: yes" in said
    assert "What would make it faster still\n· [80 %] of the step\n· MFU and roof: not known, not measured" in said


def test_the_mark_of_a_busy_machine_is_explained_under_the_table():
    document = make_document()
    assert "busy" not in print_to_text(document)
    document["trials"][1]["cpu_pressure_pct"] = 83.0
    said = print_to_text(document)
    assert "95 ± 1.1 % *" in said.replace("95.0", "95")
    assert "* a busy machine's figure (1 row)" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verify", "--verify-pairs", "1"], "needs at least 2"),
        (["--verify", "--verify-epochs", "0"], "give at least 1"),
        (["--verify-pairs", "4"], "--verify-pairs 4 says how --verify trains, and --verify is not given"),
    ],
)
def test_a_verification_that_cannot_be_is_said_before_the_search(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    assert run_command(["tune", "a.yaml", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_settings_as_they_were_are_not_verified_against_themselves(tmp_path):
    """Precision auto is spelled otherwise than the precision that was measured: six trainings of one plan."""
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\nspeed: {precision: auto}\n")
    config = load_config(tmp_path / "a.yaml")
    own = plan_of(config).replace(precision="fp32")
    plans = (own, own.replace(precision="bf16"))
    trials = [types.SimpleNamespace(plan=plan, status="ok", kind="end_to_end") for plan in plans]
    result = types.SimpleNamespace(
        user_plan=own, trials=trials, repeats=(), probes=(), folder=str(tmp_path), notes=(), null_reasons={},
        picks=types.SimpleNamespace(recommended=types.SimpleNamespace(trial=trials[0])),
        learning_rate=LearningRate(rule="none", start=None, to=None),
    )  # fmt: skip
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_without_verification", lambda result, reason: seen.append(reason))
        tune._verify(argparse.Namespace(), config, result, build_console())
    assert seen == ["the recommended plan is the user's own: there is nothing to compare"]


def test_verification_trains_what_the_search_was_about(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    words = ["a.yaml", "optim.lr=0.5", "--data-path", "x", "--device", "cpu"]
    args = build_parser("tune").parse_args(["tune", *words])
    assert _list_train_words(args, load_config("a.yaml")) == words
    parsed = build_parser("train").parse_args(["train", *_list_train_words(args, load_config("a.yaml"))])
    assert isinstance(parsed, argparse.Namespace)
    assert (parsed.config, parsed.overrides, parsed.data_path) == ("a.yaml", ["optim.lr=0.5"], "x")


@dataclasses.dataclass(frozen=True)
class FakeResult:
    folder: str
    notes: tuple[str, ...] = ()
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    user_plan: object = None
    picks: object = None

    def to_document(self):
        return make_document(notes=list(self.notes))

    def to_json_text(self):
        return json.dumps(self.to_document())


@pytest.fixture
def searched(tmp_path, monkeypatch):
    """A search that is over, in ``runs``, and the words that verify it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.tune", lambda *args, **options: FakeResult("runs"))
    return ["tune", "a.yaml", "--verify"]


def test_the_folder_is_held_while_both_plans_are_trained_and_the_verdict_written(searched, monkeypatch):
    """Two searches into one folder wrote their files over each other's."""

    def verify(args, config, result, console):
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder("runs", fingerprint_parts={}, command="tune", results=[])
        return dataclasses.replace(result, notes=("a verdict",))

    monkeypatch.setattr(tune, "_verify", verify)
    assert run_command(searched) == 0
    assert {path.name for path in Path("runs").iterdir()} == {".lock", "tune.json", "trials.csv", "report.html"}
    assert "a verdict" in Path("runs/tune.json").read_text()
    with hold_folder("runs"):
        pass


def test_a_folder_that_another_search_took_is_left_to_it(searched, monkeypatch, capsys):
    monkeypatch.setattr(tune, "_verify", lambda *args: pytest.fail("the other search runs"))
    with hold_folder("runs"):
        assert run_command(searched) == 0
    assert "--verify came to no verdict: runs is in use by process" in capsys.readouterr().out
    assert not Path("runs/tune.json").exists()


def test_a_verdict_that_could_not_be_written_is_said_before_the_error(searched, monkeypatch, capsys):
    """A full disk behind hours of training ended in one line about the disk."""

    def verify(args, config, result, console):
        return dataclasses.replace(result, notes=("a verdict",))

    def fail(result, folder):
        raise StorageError("runs/tune.json: no space left")

    monkeypatch.setattr(tune, "_verify", verify)
    monkeypatch.setattr("fulltilt.tuner.answer.result.write_result", fail)
    assert run_command([*searched, "--json", "elsewhere.json", "--apply", "a.yaml"]) == 1
    said = capsys.readouterr()
    assert "Recommended for training" in said.out
    assert "a verdict" in said.out
    assert "files:" not in said.out
    assert said.err == "fulltilt tune: runs/tune.json: no space left\n"
    assert json.loads(Path("elsewhere.json").read_text())["notes"] == ["a verdict"]


def test_a_search_whose_files_could_not_be_written_shows_what_it_found(searched, monkeypatch, capsys):
    """18 trials and then one line, ``no space left for tune.json``: no table, no pick."""

    def search(*args, **options):
        raise ResultUnwrittenError("runs/tune.json: no space left", FakeResult("runs"))

    monkeypatch.setattr("fulltilt.tuner.tune", search)
    monkeypatch.setattr(tune, "_verify", lambda *args: pytest.fail("there is no room for trainings either"))
    assert run_command([*searched, "--json", "elsewhere.json"]) == 1
    said = capsys.readouterr()
    assert "Recommended for training" in said.out
    assert "--verify came to no verdict: runs/tune.json: no space left" in said.out
    assert said.err == "fulltilt tune: runs/tune.json: no space left\n"
    assert json.loads(Path("elsewhere.json").read_text())["trials"]


def test_a_training_that_could_not_be_kept_leaves_the_search_its_result(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    config = load_config(tmp_path / "a.yaml")

    def fail(*args, **options):
        raise StorageError("pair-1.json: no space left")

    monkeypatch.setattr("fulltilt.tuner.answer.verify.run_verification", fail)
    monkeypatch.setattr(
        "fulltilt.tuner.answer.apply.plan_changes", lambda *args, **options: types.SimpleNamespace(values={"a": 1})
    )
    own = plan_of(config)
    pick = types.SimpleNamespace(trial=types.SimpleNamespace(plan=own.replace(compile=True)))
    searched = FakeResult(str(tmp_path), user_plan=own, picks=types.SimpleNamespace(recommended=pick))

    args = build_parser("tune").parse_args(["tune", str(tmp_path / "a.yaml"), "--verify"])
    result = tune._verify(args, config, searched, build_console())
    assert result.notes == ("--verify came to no verdict: pair-1.json: no space left",)


@pytest.mark.parametrize(
    ("status", "savings", "said"),
    [
        ("ok", None, "too few runs were made to tell it from the settings as they were"),
        ("ok", "no gain", "could not prove that it is faster than the settings as they were"),
        ("ok", "faster", ""),
        ("out_of_memory", None, ""),
    ],
)
def test_settings_that_are_not_proven_faster_are_written_with_that_word(status, savings, said):
    """Numerics and recipe were changed in the file, and that nothing was proven stood thirty lines above it."""
    result = types.SimpleNamespace(
        baseline=types.SimpleNamespace(status=status),
        savings=None if savings is None else types.SimpleNamespace(verdict=savings),
    )
    doubt = _name_doubt(result)
    assert doubt.endswith(said)
    assert bool(doubt) is bool(said)
