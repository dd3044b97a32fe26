"""``fulltilt compare`` of two configurations: the sentence of each verdict, the document, and what is refused."""

import itertools
import json
import re
from pathlib import Path

import pytest

from fulltilt.cli import run_command
from fulltilt.errors import TrainingError
from fulltilt.records import Evidence
from fulltilt.stats import Turns, alternation
from fulltilt.tuner import comparing
from fulltilt.tuner.trials.live import ArmFailedError

ROOT = Path(__file__).parents[3]
DIGITS = str(ROOT / "configs" / "digits.yaml")
SHORT = ["--budget", "0.0001s"]  # four groups


class FakeRunner:
    """Answers each group with the next ratio of B to A; an Evidence is how B failed, an exception is raised."""

    takes_turns, waits_passively = True, False

    def __init__(self, ratios, rate=1000.0, stalled_pct=0.0):
        self.ratios, self.rate, self.stalled_pct, self.requests = itertools.cycle(ratios), rate, stalled_pct, []

    def __call__(self, requests):
        self.requests.append(requests)
        ratio = next(self.ratios)
        if isinstance(ratio, Evidence):
            raise ArmFailedError("b", ratio, Path("b.log"))
        if isinstance(ratio, BaseException):
            raise ratio
        return {
            name: Turns(samples_per_s=rate, stalled_pct=self.stalled_pct)
            for name, rate in (("a", self.rate), ("b", self.rate * ratio))
        }


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command with groups that are as planted; returns the exit code, stdout, stderr and the runner."""

    def run_compare(*args, ratios=(1.5, 1.51, 1.49, 1.5), **fields):
        runner = FakeRunner(ratios, **fields)
        monkeypatch.setattr(comparing, "GroupRunner", lambda zygote, folder: runner)
        code = run_command(["compare", *map(str, args)])
        said = capsys.readouterr()
        return code, said.out, said.err, runner

    return run_compare


@pytest.mark.parametrize(
    ("ratios", "sentence"),
    [
        ((1.5, 1.51, 1.49, 1.5), r"B is 1\.50 × as fast as A \(1\.4\d to 1\.5\d\)"),
        ((0.5, 0.51, 0.49, 0.5), r"B is 50 % slower than A \(4\d to 5\d %\)"),
        ((25.0, 25.1, 24.9, 25.0), r"B is 25 × as fast as A \(25 to 25\)"),
        ((1.0, 1.003, 0.997, 1.0), r"B is as fast as A, within [01]\.\d %"),
        ((1.0, 1.1, 0.9, 1.05), r"Not decided whether B is faster than A: between \d+ % slower and \d+ % faster"),
        ((1.0, 9.0, 0.5, 2.0), r"Not decided whether B is faster than A: between \d+ % slower and \d+ × as fast"),
    ],
)
def test_the_answer_is_one_sentence_with_its_interval_and_what_it_rests_on(run, ratios, sentence, monkeypatch):
    monkeypatch.chdir(ROOT)  # a long path would be cut
    code, out, _, _ = run("configs/digits.yaml", "data.batch_size=32", *SHORT, ratios=ratios)
    first, *rest = re.sub(r" \n(?=fresh|processes|that|took)", " ", out).splitlines()
    assert code == 0
    assert re.fullmatch(rf"{sentence}; 4 groups of fresh processes that took turns, \d+ s\.", first), first
    assert rest[0].startswith("A ")
    assert rest[0].endswith("1,000 samples/s  configs/digits.yaml")
    assert rest[1].endswith("samples/s  data.batch_size=32")
    assert "   data.batch_size: 64 → 32" in rest
    assert ("next: a longer --budget, or a quieter machine" in rest) == first.startswith("Not decided")
    assert not any("busy" in line or "same training" in line for line in rest)


def test_the_document_gives_b_the_speed_that_the_screen_shows(run):
    """B's own median stood there, which is not A's times the gain that was compared."""
    _, out, err, _ = run(DIGITS, "data.batch_size=32", *SHORT, "--json", "-", ratios=(1.2, 1.3, 1.31, 1.9))
    document = json.loads(out)
    rate, gain_pct = document["b"]["samples_per_s"], document["comparison"]["gain_pct"]
    assert rate == pytest.approx(document["a"]["samples_per_s"] * (1 + gain_pct / 100))
    assert rate != pytest.approx(1305.0)
    assert f"{rate:,.0f} samples/s" in err


@pytest.mark.parametrize(
    ("ratios", "said"),
    [
        ([KeyboardInterrupt()], "nothing was measured yet"),
        (
            [1.2, 1.3, 1.4, KeyboardInterrupt()],
            "not decided whether B is faster than A: between",
        ),
    ],
)
def test_what_is_known_so_far_is_said_where_it_is_interrupted(run, ratios, said):
    """Ctrl-C after a minute of groups lost all of them."""
    code, out, err, _ = run(DIGITS, "data.batch_size=32", "--budget", "9s", ratios=ratios)
    assert (code, out) == (130, "")
    assert said in err


def test_processes_that_cannot_start_say_why_since_their_log_goes_with_its_folder(run, tmp_path):
    log = tmp_path / "zygote.log"
    log.write_text("Traceback\nOSError: libtorch is cut\n")
    fault = TrainingError(f"trial processes cannot start: it ended with exit code 1 (log: {log})")
    code, _, err, _ = run(DIGITS, "data.batch_size=32", *SHORT, ratios=[fault])
    assert code == fault.exit_code
    assert "it ended with exit code 1" in err
    assert "OSError: libtorch is cut" in err
    assert "log:" not in err


def test_bars_are_as_long_as_the_rates(run):
    _, out, _, _ = run(DIGITS, "data.batch_size=32", *SHORT, ratios=(2.0, 2.0, 2.0, 2.0))
    shorter, longer = (line.count("█") for line in out.splitlines()[1:3])
    assert longer == 2 * shorter == 36


def test_a_machine_that_was_busy_is_said_and_so_is_that_nothing_differs(run):
    _, out, _, runner = run(DIGITS, DIGITS, *SHORT, ratios=(1.0, 1.001, 1.0, 0.999), stalled_pct=12.0)
    assert out.startswith("B is as fast as A, within")
    assert "no setting differs: this is how far the same training is from itself" in out
    assert "the machine was busy: a plan spent up to 12 % of its time in stalls" in out
    assert "busy" not in run(DIGITS, DIGITS, *SHORT, stalled_pct=4.9)[1], "as in a search"
    a, b = (runner.requests[0][name] for name in "ab")
    assert a.plan == b.plan
    assert a.source == b.source


@pytest.mark.parametrize(("flags", "is_whole"), [([], False), (["--verbose"], True)])
def test_what_differs_leaves_the_answer_on_the_screen(run, tmp_path, flags, is_whole):
    """Two files that differed in everything pushed the sentence off the screen."""
    other = tmp_path / f"{'a_long_name_' * 9}.yaml"
    other.write_text(
        "task: classification\nmodel: mlp\n"
        "data: {dataset: digits, batch_size: 32, num_workers: 2, val_batch_size: 99,"
        f" transform: {{train: '{' | '.join(['flip'] * 30)}', val: normalize}}}}\n"
        "optim: {optimizer: sgd, lr: 0.1, schedule: constant, weight_decay: 0.1}\n"
        "speed: {precision: bf16, threads: 1, channels_last: true, fused_optimizer: true}\n"
        "run: {epochs: 3, seed: 7}\n"
    )
    noisy = (1.0, 9.0, 0.5, 2.0)
    code, out, _, _ = run(DIGITS, other, *SHORT, *flags, ratios=noisy, stalled_pct=12.0)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("Not decided")
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("   and ") and line.endswith("more: --verbose") for line in lines) == (not is_whole)
    assert is_whole or len(lines) <= 24
    assert ("run.seed: 42 → 7" in out) == is_whole


def test_another_model_is_said_to_be_another_training(run, tmp_path):
    """A small network in place of a large one was called 2.9 times as fast without a word."""
    other = tmp_path / "other.yaml"
    other.write_text(Path(DIGITS).read_text().replace("model: small_cnn", "model: mlp"))
    assert "not the same training: only samples/s are compared" in run(DIGITS, other, *SHORT)[1].splitlines()


def test_the_document_holds_both_sides_and_is_all_of_stdout(run, tmp_path):
    other = tmp_path / "other.yaml"
    other.write_text(Path(DIGITS).read_text().replace("precision: fp32", "precision: bf16"))
    code, out, err, runner = run(DIGITS, other, "data.num_workers=2", "--device", "cpu", *SHORT, "--json", "-")
    document = json.loads(out)
    assert (code, document["version"], document["kind"], document["takes_turns"]) == (0, 1, "measured", True)
    assert document["differences"] == {"data.num_workers": [0, 2], "speed.precision": ["fp32", "bf16"]}
    assert document["comparison"]["verdict"] == "faster"
    low, high = document["comparison"]["ci_pct"]
    assert low < document["comparison"]["gain_pct"] < high
    assert document["comparison"]["n_groups"] == 4
    assert [document[key]["name"] for key in "ab"] == [DIGITS, f"{other} data.num_workers=2"]
    assert [document[key]["samples_per_s"] for key in "ab"] == [1000.0, pytest.approx(1500, rel=0.01)]
    assert document["b"]["plan"]["num_workers"] == 2
    assert "B is 1.50 × as fast as A" in err
    assert {request.device for group in runner.requests for request in group.values()} == {"cpu"}
    saved = tmp_path / "saved.json"
    assert run(DIGITS, "data.batch_size=32", *SHORT, "--json", saved)[0] == 0
    assert json.loads(saved.read_text()).keys() == document.keys()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["result.json", DIGITS], "result.json is a result, and"),
        (["result.json", "data.batch_size=32"], "result.json is a result, and data.batch_size=32 is none"),
        ([DIGITS, "result.json"], "is a configuration, and result.json is none"),
        (["missing.yaml", DIGITS], "missing.yaml"),
        ([DIGITS, "missing.yaml"], "missing.yaml"),
        ([DIGITS, "data.batch_sise=32"], "batch_size"),
        ([DIGITS, "data.batch_size=none at all"], "batch_size"),
        ([DIGITS, DIGITS, "--budget", "soon"], "'soon' is not a duration"),
        ([DIGITS, DIGITS, "--budget", "0s"], "more than zero"),
        ([DIGITS, DIGITS, "--device", "tpu"], "tpu"),
        (["result.json", "result.json", "--device", "cpu", "--budget", "5s"], "--device and --budget are for config"),
    ],
)
def test_wrong_use_is_said_before_anything_is_measured(run, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    Path("result.json").write_text("{}")
    code, out, err, runner = run(*args)
    assert (code, out, runner.requests) == (2, "", [])
    assert words in err


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(exception_type="ValueError", message="planted\nsecond line"), r"\(error\): ValueError: planted"),
        (Evidence(exception_type="MemoryError", message="no room"), r"\(out_of_memory\): MemoryError: no room"),
        (Evidence(deadline="no result after 61 s; a longer --deadline"), r"\(timeout\): no result after 61 s"),
    ],
)
def test_a_configuration_that_cannot_train_is_named_with_its_reason(run, evidence, words):
    code, out, err, runner = run(DIGITS, "data.batch_size=32", *SHORT, ratios=(1.5, evidence))
    assert (code, out, len(runner.requests)) == (3, "", 2)
    assert re.search(rf"data\.batch_size=32 cannot be trained here {words}", err), err
    assert "log:" not in err, "it is gone with its folder"
    assert "second line" not in err


@pytest.mark.parametrize(("budget", "deadline_s"), [("15s", 60), ("60s", 120), ("10m", 1200)])
def test_how_long_a_process_may_take_to_start_follows_the_budget(run, budget, deadline_s):
    """A data set that hung cost two minutes of a budget of 15 s, and a flag was named that there is not."""
    *_, runner = run(DIGITS, "data.batch_size=32", *SHORT, "--budget", budget)
    asked = {(request.deadline_s, request.patience_s) for request in runner.requests[0].values()}
    assert asked == {(deadline_s, 1.25 * deadline_s)}, "what is late needs a larger --budget"


@pytest.mark.slow
def test_a_real_comparison_on_few_groups_trains_both(monkeypatch, capsys):
    monkeypatch.setattr(alternation, "LOOKS", (2,))
    args = ["compare", DIGITS, "data.batch_size=4", "--device", "cpu", "--budget", "0.1s", "--json", "-"]
    assert run_command(args) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["takes_turns"]
    assert document["comparison"]["n_groups"] == 2
    assert document["a"]["samples_per_s"] > document["b"]["samples_per_s"] > 0


@pytest.mark.slow
def test_a_real_comparison_ends_when_it_is_decided(capsys):
    args = ["compare", DIGITS, "data.batch_size=4", "--device", "cpu", "--budget", "10m", "--json", "-"]
    assert run_command(args) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["comparison"]["verdict"] == "slower", "a step of 4 samples takes far more than 1/16 of one of 64"
    assert document["comparison"]["n_groups"] in alternation.LOOKS
    assert document["seconds"] < 600


def test_a_real_configuration_that_cannot_train_says_why(capsys):
    assert run_command(["compare", "no_such_module:workload", "data.batch_size=4", "--device", "cpu"]) == 3
    said = capsys.readouterr().err
    sides = ("no_such_module:workload", "data.batch_size=4")  # which of them starts first is drawn
    assert any(f"{side} cannot be trained here (error): " in said for side in sides)
    assert "no module 'no_such_module'" in said
