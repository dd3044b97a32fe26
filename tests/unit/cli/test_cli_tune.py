"""What ``fulltilt tune`` prints and refuses, without a search."""

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tests.unit.cli.cli_cases import STARTED
from tests.unit.report.report_documents import BUSY, OWN, build_document, build_pick, compare

from fulltilt.cli import build_parser, run_command, tune
from fulltilt.cli.tune import print_details
from fulltilt.config import load_config, plan_of
from fulltilt.errors import ResultUnwrittenError, RunFolderError, StorageError
from fulltilt.records.run_folder import RunFolder, hold_folder
from fulltilt.tuner.answer.apply import Applied
from fulltilt.tuner.picks.changes import LearningRate
from fulltilt.tuner.search.progress import SearchNoted

GAIN, OPEN = compare(32, 24, 41), compare(3, -4, 11)


def print_all(document):
    console = Console(file=io.StringIO(), width=160, highlight=False, markup=False)
    print_details(console, document)
    return console.file.getvalue()


def test_all_picks_are_named_in_the_table_and_explained_under_it():
    document = build_document(GAIN)
    document["picks"] = document["picks"] | {"memory": build_pick(OWN, rule="least memory")}
    said = print_all(document)
    assert "ok ← recommended, throughput" in said
    assert "ok ← memory" in said
    assert "Least memory at an acceptable speed\n  batch_size 32" in said
    assert "the same plan as recommended for training; rule: fastest" in said
    assert "What would make it faster still" not in said


def test_the_rule_of_a_plan_that_is_not_recommended_is_said_too():
    document = build_document(OPEN)
    document["picks"]["unproven"]["rule"] = "the best other plan in turns"
    document["picks"]["throughput"] = build_pick(OWN)
    said = print_all(document)
    assert "Best other plan, not recommended\n  batch_size 32" in said
    assert "rule: the best other plan in turns" in said
    assert "ok ← unproven" in said
    assert "not recommended" not in print_all(build_document(GAIN))


def test_advice_and_notes_are_printed_under_the_picks():
    advice = {"bound": {"text": "[80 %] of the step"}, "roof": None, "ceilings": [], "levers": []}
    more = {"null_reasons": {"advice.roof": "not measured"}, "notes": ["a [note]"]}
    said = print_all(build_document(GAIN, advice=advice, **more))
    assert "Notes\n· a [note]" in said
    assert "What would make it faster still\n· [80 %] of the step\n· MFU and roof: not known, not measured" in said


def test_the_mark_of_a_busy_machine_is_explained_under_the_table():
    document = build_document(GAIN)
    assert "busy" not in print_all(document)
    document["trials"] = [document["trials"][0] | BUSY, document["trials"][1]]
    said = print_all(document)
    assert "9,000 ± 2.0 % *" in said
    assert "* a busy machine's figure (1 row)" in said


def make_picks(row, *, unproven=None):
    """Picks that recommend a row, or that have another one which is not proven."""
    recommended, other = (
        SimpleNamespace(trial=row, proven=unproven is None),
        unproven and SimpleNamespace(trial=unproven),
    )
    return SimpleNamespace(recommended=recommended, unproven=other, best=other or recommended)


@dataclasses.dataclass(frozen=True)
class FakeResult:
    """A search that is over, whose files lie in ``runs``."""

    folder: str = "runs"
    notes: tuple[str, ...] = ()
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    user_plan: object = None
    picks: object = dataclasses.field(default_factory=lambda: make_picks("pick"))
    trials: tuple = ()
    repeats: tuple = ()
    probes: tuple = ()
    learning_rate: object = LearningRate(rule="none", start=None, to=None)
    baseline: object = None
    verification: object = None
    document: dict = dataclasses.field(default_factory=lambda: build_document(GAIN))

    def to_document(self):
        return self.document | {"notes": list(self.notes)}

    def to_json_text(self):
        return json.dumps(self.to_document())


def make_row(plan, status="ok"):
    return SimpleNamespace(plan=plan, status=status, kind="end_to_end")


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


def read_words(capsys):
    """What was printed, as if no line ended."""
    return " ".join(capsys.readouterr().out.replace("\\", "").split())


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
    found = FakeResult(user_plan=own, trials=rows, picks=make_picks(rows[0]), baseline=rows[0])
    assert search("--verify", result=found) == 0
    assert "the recommended plan is the user's own: there is nothing to compare" in read_words(capsys)


def test_verification_trains_what_the_search_was_about_and_its_failure_leaves_the_result(search, monkeypatch, capsys):
    own = plan_of(load_config("a.yaml"))
    trained = []

    def fail(words, settings, **options):
        trained.extend(words)
        raise StorageError("pair-1.json: no space left")

    monkeypatch.setattr("fulltilt.tuner.answer.verify.run_verification", fail)
    changes = SimpleNamespace(values={"a": 1})
    monkeypatch.setattr("fulltilt.tuner.answer.apply.plan_changes", lambda *args, **options: changes)
    words = ["optim.lr=0.5", "--data-path", "x", "--device", "cpu"]
    picks = make_picks(make_row(own.replace(compile=True)))
    found = FakeResult(user_plan=own, picks=picks, baseline=make_row(own))
    assert search(*words, "--verify", result=found) == 0
    assert "--verify came to no verdict: pair-1.json: no space left" in capsys.readouterr().out
    assert trained == ["a.yaml", *words]
    parsed = build_parser("train").parse_args(["train", *trained])
    assert (parsed.config, parsed.overrides, parsed.data_path) == ("a.yaml", ["optim.lr=0.5"], "x")


@pytest.mark.parametrize("baseline", [None, make_row(None, "out_of_memory")])
def test_what_did_not_run_is_not_trained_for_a_verdict(baseline, search, capsys):
    assert search("--verify", result=FakeResult(baseline=baseline)) == 0
    assert "--verify came to no verdict: the settings as they were did not run" in read_words(capsys)


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
    full, result = StorageError("runs/tune.json: no space left"), FakeResult() if searched else None

    def fail(*args, **options):
        raise full if searched else ResultUnwrittenError(str(full), FakeResult())

    no_room = lambda *args: pytest.fail("there is no room for trainings either")  # noqa: E731
    monkeypatch.setattr(tune, "_verify", give_verdict if searched else no_room)
    monkeypatch.setattr("fulltilt.tuner.answer.result.write_result" if searched else "fulltilt.tuner.tune", fail)
    assert search("--verify", "--json", "elsewhere.json", "--apply", "a.yaml", result=result) == 1
    said = capsys.readouterr()
    assert "1.32 × as fast as your settings" in said.out
    assert "\nfiles " not in said.out
    assert said.err == f"fulltilt tune: {full}\n"
    document = json.loads(Path("elsewhere.json").read_text())
    assert document["trials"]
    assert document["notes"] == ["a verdict" if searched else f"--verify came to no verdict: {full}"]


@pytest.mark.parametrize(
    ("words", "is_proven", "verdict", "written", "said"),
    [
        ([], True, None, "pick", "written into a.yaml:"),
        ([], True, "learns as well", "pick", "written into a.yaml:"),
        ([], False, None, None, "a.yaml stays as it is: no gain is proven (--apply-unproven writes"),
        (
            [],
            True,
            "learns worse",
            None,
            "a.yaml stays as it is: the fastest plan learned worse (--apply-unproven writ",
        ),
        (["--apply-unproven"], False, None, "other", "written into a.yaml, though no gain is proven:"),
        (
            ["--apply-unproven"],
            True,
            "learns worse",
            "other",
            "written into a.yaml, though the fastest plan learned wor",
        ),
    ],
)
def test_only_a_plan_that_is_proven_is_written_into_the_file_unless_asked_for_all_the_same(
    words, is_proven, verdict, written, said, search, monkeypatch, capsys
):
    """Numerics and recipe were changed in the file, and that nothing was proven stood thirty lines above it."""
    applied = []

    def apply(result, path, *, pick, searched):
        applied.append(pick.trial)
        return Applied(diff="+ x")

    monkeypatch.setattr("fulltilt.tuner.answer.apply.apply_result", apply)
    has_other = not is_proven or verdict == "learns worse"  # then it is not the recommended one
    picks = make_picks("own", unproven="other") if has_other else make_picks("pick")
    verification = verdict and SimpleNamespace(verdict=verdict)
    result = FakeResult(picks=picks, verification=verification)
    assert search("--apply", "a.yaml", *words, result=result) == 0
    assert applied == ([written] if written else [])
    assert f"\n{said}" in capsys.readouterr().out


def test_quiet_leaves_one_sentence(search, monkeypatch, capsys):
    monkeypatch.setattr("fulltilt.tuner.answer.apply.apply_result", lambda *args, **options: Applied(diff="+ x"))
    sentence = "1.32 × as fast as your settings (1.24 to 1.41), proven; recipe and numerics stay.\n"
    assert search("--quiet", result=FakeResult(picks=make_picks("pick"))) == 0
    assert capsys.readouterr().out == sentence
    assert search("--quiet", "--apply", "a.yaml", result=FakeResult(picks=make_picks("pick"))) == 0
    assert capsys.readouterr().out == sentence + "written into a.yaml\n"
    assert search("--quiet", "--verbose") == 2
    assert "--quiet and --verbose ask for opposites" in capsys.readouterr().err


def test_quiet_leaves_notes_and_what_helps_an_open_verdict_on_stderr(search, monkeypatch, capsys):
    """What was taken as the user's own, a row that was left out, a verification without verdict: none was said."""

    def search_and_note(*args, on_event, **options):
        on_event(SearchNoted(message="placement: cannot apply"))
        on_event(STARTED)
        return FakeResult(document=build_document(OPEN, search={"stopped_by_budget": True, "stalled_pct": 40.0}))

    monkeypatch.setattr("fulltilt.tuner.tune", search_and_note)
    applied = ["a.yaml stays as it is", "a.yaml: scale the learning rate there", "+ x"]
    monkeypatch.setattr(tune, "apply_picked", lambda *args: applied)
    assert search("--quiet", "--verify", "--apply", "a.yaml") == 0
    said = capsys.readouterr()
    assert said.out.splitlines()[1:] == ["a.yaml stays as it is"]
    assert said.out.startswith("Keep your settings")
    assert said.err.splitlines() == [
        "note: placement: cannot apply",
        "note: the machine was busy: a plan spent up to 40 % of its time in stalls",
        "note: --verify came to no verdict: the settings as they were did not run: there is nothing to hold it against",
        "note: a larger --budget: the same command goes on from here; or a quiet machine, with a new --out",
        "note: a.yaml: scale the learning rate there",
    ]


def test_the_screen_comes_last_and_says_how_to_apply_what_is_proven(search, capsys):
    assert search("--verbose", result=FakeResult()) == 0
    said = capsys.readouterr().out
    assert said.index("Highest throughput") < said.index("1.32 × as fast as your settings")
    last = said.splitlines()[-3:]
    assert last == [
        "apply    fulltilt tune a.yaml --verbose --apply a.yaml",
        "         (reads this search: what ran does not run again)",
        "files    runs/report.html, tune.json, trials.csv",
    ]
    assert search(result=FakeResult(document=build_document(OPEN))) == 0
    said = capsys.readouterr().out
    assert said.startswith("\nKeep your settings, no gain is proven")
    assert "\napply " not in said


def test_a_workload_without_a_file_is_told_how_to_train_with_what_was_found(search, monkeypatch, capsys):
    changes = SimpleNamespace(values={"data.num_workers": 2, "speed.fused_optimizer": True})
    monkeypatch.setattr("fulltilt.tuner.answer.apply.plan_changes", lambda *args, **options: changes)
    monkeypatch.setattr("fulltilt.tuner.tune", lambda *args, **options: FakeResult(picks=make_picks("pick")))
    assert run_command(["tune", "my_module:workload", "--device", "cpu"]) == 0
    wanted = "fulltilt train my_module:workload --device cpu data.num_workers=2 speed.fused_optimizer=true"
    assert wanted in read_words(capsys)


def test_the_help_names_the_default_budget_and_all_that_a_search_of_what_is_named_varies(search, capsys):
    with pytest.raises(SystemExit):
        search("--help")
    told = read_words(capsys)
    assert "(default 3m, or 24 more runs as long as the first where that is more; 90s with --quick" in told
    assert "AMP and pinning where the configuration asks, and its benchmark.levers; with --batch-sizes" in told


def test_a_search_of_what_was_named_says_on_its_screen_what_the_whole_one_would_add(search, monkeypatch, capsys):
    left_out = ("threads", "compile", "channels_last", "fused_optimizer")
    started = dataclasses.replace(STARTED, levers_left_out=left_out, full_grid_size=2017)

    def search_nothing(config, *, on_event, named_only, **options):
        on_event(started if named_only else STARTED)
        return FakeResult()

    monkeypatch.setattr("fulltilt.tuner.tune", search_nothing)
    assert search("--named-only") == 0
    said = capsys.readouterr().out
    assert (
        "next `fulltilt tune` with the same flags tries 4 more switches (threads, compile, channels_last, …): on from "
        "these rows, a grid of 2,017, at most 3 min 00 s where runs are short"
    ) in " ".join(said.split())
    assert max(map(len, said[said.index("1.32 ×") :].splitlines())) <= 100
    assert said.splitlines()[-1].startswith("files "), "it stood below the screen, in a line of 240 columns"
    assert search() == 0
    assert "with the same flags" not in capsys.readouterr().out
