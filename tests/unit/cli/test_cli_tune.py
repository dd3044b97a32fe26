"""What ``fulltilt tune`` prints and refuses, without a search."""

import dataclasses
import io
import json
import types
from pathlib import Path

import pytest
from rich.console import Console

from fulltilt.cli import build_parser, run_command, tune
from fulltilt.cli.tune import print_result
from fulltilt.config import load_config, plan_of
from fulltilt.errors import ResultUnwrittenError, RunFolderError, StorageError
from fulltilt.levers import default_plan
from fulltilt.records.run_folder import RunFolder, hold_folder
from fulltilt.tuner.answer.apply import Applied
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


@dataclasses.dataclass(frozen=True)
class FakeResult:
    """A search that is over, whose files lie in ``runs``."""

    folder: str = "runs"
    notes: tuple[str, ...] = ()
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    user_plan: object = None
    picks: object = None
    trials: tuple = ()
    repeats: tuple = ()
    probes: tuple = ()
    learning_rate: object = LearningRate(rule="none", start=None, to=None)
    baseline: object = None
    savings: object = None

    def to_document(self):
        return make_document(notes=list(self.notes))

    def to_json_text(self):
        return json.dumps(self.to_document())


def make_row(plan, status="ok"):
    return types.SimpleNamespace(plan=plan, status=status, kind="end_to_end")


def make_picks(row):
    return types.SimpleNamespace(recommended=types.SimpleNamespace(trial=row))


@pytest.fixture
def search(tmp_path, monkeypatch):
    """Run ``fulltilt tune a.yaml`` with more words, of which the search itself gives ``result``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")

    def run(*words, result=None):
        if result is not None:
            monkeypatch.setattr("fulltilt.tuner.tune", lambda *args, **options: result)
        return run_command(["tune", "a.yaml", *words])

    return run


def give_verdict(args, config, result, console):
    return dataclasses.replace(result, notes=("a verdict",))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verify", "--verify-pairs", "1"], "needs at least 2"),
        (["--verify", "--verify-epochs", "0"], "give at least 1"),
        (["--verify-pairs", "4"], "--verify-pairs 4 says how --verify trains, and --verify is not given"),
    ],
)
def test_a_verification_that_cannot_be_is_said_before_the_search(words, said, search, capsys):
    assert search(*words) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_settings_as_they_were_are_not_verified_against_themselves(search, capsys):
    """Precision auto is spelled otherwise than the precision that was measured: six trainings of one plan."""
    Path("a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\nspeed: {precision: auto}\n")
    own = plan_of(load_config("a.yaml")).replace(precision="fp32")
    rows = (make_row(own), make_row(own.replace(precision="bf16")))
    assert search("--verify", result=FakeResult(user_plan=own, trials=rows, picks=make_picks(rows[0]))) == 0
    assert "the recommended plan is the user's own: there is nothing to compare" in capsys.readouterr().out


def test_verification_trains_what_the_search_was_about_and_its_failure_leaves_the_result(search, monkeypatch, capsys):
    own = plan_of(load_config("a.yaml"))
    trained = []

    def fail(words, settings, **options):
        trained.extend(words)
        raise StorageError("pair-1.json: no space left")

    monkeypatch.setattr("fulltilt.tuner.answer.verify.run_verification", fail)
    changes = types.SimpleNamespace(values={"a": 1})
    monkeypatch.setattr("fulltilt.tuner.answer.apply.plan_changes", lambda *args, **options: changes)
    words = ["optim.lr=0.5", "--data-path", "x", "--device", "cpu"]
    picks = make_picks(make_row(own.replace(compile=True)))
    assert search(*words, "--verify", result=FakeResult(user_plan=own, picks=picks)) == 0
    assert "--verify came to no verdict: pair-1.json: no space left" in capsys.readouterr().out
    assert trained == ["a.yaml", *words]
    parsed = build_parser("train").parse_args(["train", *trained])
    assert (parsed.config, parsed.overrides, parsed.data_path) == ("a.yaml", ["optim.lr=0.5"], "x")


def test_the_folder_is_held_while_both_plans_are_trained_and_the_verdict_written(search, monkeypatch):
    """Two searches into one folder wrote their files over each other's."""

    def verify(*args):
        with pytest.raises(RunFolderError, match="in use"):
            RunFolder("runs", fingerprint_parts={}, command="tune", results=[])
        return give_verdict(*args)

    monkeypatch.setattr(tune, "_verify", verify)
    assert search("--verify", result=FakeResult()) == 0
    assert {path.name for path in Path("runs").iterdir()} == {".lock", "tune.json", "trials.csv", "report.html"}
    assert "a verdict" in Path("runs/tune.json").read_text()
    with hold_folder("runs"):
        pass


def test_a_folder_that_another_search_took_is_left_to_it(search, monkeypatch, capsys):
    monkeypatch.setattr(tune, "_verify", lambda *args: pytest.fail("the other search runs"))
    with hold_folder("runs"):
        assert search("--verify", result=FakeResult()) == 0
    assert "--verify came to no verdict: runs is in use by process" in capsys.readouterr().out
    assert not Path("runs/tune.json").exists()


@pytest.mark.parametrize("searched", [True, False])
def test_what_was_found_is_said_before_the_error_that_kept_it_from_being_written(searched, search, monkeypatch, capsys):
    """A full disk behind hours of training, or behind 18 trials, ended in one line about the disk."""
    full = StorageError("runs/tune.json: no space left")

    def fail(*args, **options):
        raise full if searched else ResultUnwrittenError(str(full), FakeResult())

    if searched:
        monkeypatch.setattr(tune, "_verify", give_verdict)
        monkeypatch.setattr("fulltilt.tuner.answer.result.write_result", fail)
    else:
        monkeypatch.setattr(tune, "_verify", lambda *args: pytest.fail("there is no room for trainings either"))
        monkeypatch.setattr("fulltilt.tuner.tune", fail)
    result = FakeResult() if searched else None
    assert search("--verify", "--json", "elsewhere.json", "--apply", "a.yaml", result=result) == 1
    said = capsys.readouterr()
    assert "Recommended for training" in said.out
    assert ("a verdict" if searched else f"--verify came to no verdict: {full}") in said.out
    assert "files:" not in said.out
    assert said.err == f"fulltilt tune: {full}\n"
    document = json.loads(Path("elsewhere.json").read_text())
    assert document["trials"]
    assert document["notes"]


@pytest.mark.parametrize(
    ("status", "savings", "said"),
    [
        ("ok", None, ", though too few runs were made to tell it from the settings as they were:"),
        ("ok", "no gain", ", though this search could not prove that it is faster than the settings as they were:"),
        ("ok", "faster", ":"),
        ("out_of_memory", None, ":"),
    ],
)
def test_settings_that_are_not_proven_faster_are_written_with_that_word(
    status, savings, said, search, monkeypatch, capsys
):
    """Numerics and recipe were changed in the file, and that nothing was proven stood thirty lines above it."""
    monkeypatch.setattr("fulltilt.tuner.answer.apply.apply_result", lambda *args, **options: Applied(diff="+ x"))
    verdict = None if savings is None else types.SimpleNamespace(verdict=savings)
    result = FakeResult(baseline=make_row(None, status), savings=verdict)
    assert search("--apply", "a.yaml", result=result) == 0
    assert f"\nwritten into a.yaml{said}\n" in capsys.readouterr().out
