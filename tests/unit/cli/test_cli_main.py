import contextlib
import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.unit.cli.cli_cases import STARTED, FakeTerminal, done, make_trial
from tests.unit.cli.test_cli_compare import build_search

from fulltilt.cli import COMMANDS, EXIT_BROKEN_PIPE, Terminated, _shared, build_parser, list_leaves, run_command
from fulltilt.cli._shared import show_progress, write_json
from fulltilt.engine.loop import opening
from fulltilt.errors import FulltiltError, NoPlanError, TrainingError, find_place
from fulltilt.levers import load_catalogue
from fulltilt.records.run_folder import RunFolder

CONFIG = "model: small_cnn\ndata: {dataset: digits}\n"
DONE, RESUMED = done(make_trial()), done(make_trial(), is_resumed=True)


@pytest.fixture(autouse=True)
def _a_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text(CONFIG)


def run_words(*words):
    try:
        return run_command(words)
    except SystemExit as ended:
        return ended.code


def run_python(*words, stdout=subprocess.PIPE):
    return subprocess.run([sys.executable, *words], stdout=stdout, stderr=subprocess.PIPE, text=True)


def read_error(text):
    document = json.loads(text)
    assert document.pop("version") == 1
    return document


def raise_from(monkeypatch, place, error):
    def fail(*args, **options):
        raise error

    monkeypatch.setattr(place, fail)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], list(COMMANDS)),
        *(([command], [f"fulltilt {command}"]) for command in COMMANDS),
        (["tune"], ["rows in the run folder are free, the trainings of --verify come on top"]),
        (["compare"], ["Two trainings may differ in their recipe, optimizer included"]),
    ],
)
def test_every_command_has_help(words, said, capsys):
    assert run_words(*words, "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert all(part in out for part in said)
    assert words or run_words() == 2  # no command is wrong usage, and answered with the help


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["levers", "--colour"], "fulltilt levers: error: unrecognized arguments: --colour"),
        (["levers", "--json", "-", "batch_size", "--colour=3"], "unrecognized arguments: --colour=3"),
        (["tune", "--dry"], "usage: fulltilt tune [-h]"),
        (["data", "inspect", "f.h5", "--dry"], "usage: fulltilt data inspect [-h]"),
        (["--dry"], "usage: fulltilt [-h]"),
        (["levers", "--json", "-x"], "--json: expected one argument"),
        (["tune", "a.yaml", "--json", "--quick"], "--json"),  # wrote a file of the name ``--quick``
        (["tune", "a.yaml", "--colour", "--", "--json", "place"], "--colour"),
        (["tune", "--batch", "3", "x.yaml", "lr=1"], "unrecognized arguments: --batch 3\n"),
        (["tune", "x.yaml", "--batch-sizes", "32", "many"], "--batch-sizes: invalid int value: 'many'"),
        (["levers", "num_worker"], "did you mean num_workers"),
        (["train"], "no configuration was given"),
        (["levers", "--json", "none/result.json"], "there is no folder none; make it first"),
        (["tune", "a.yaml", "--json", "."], "--json .: it is a folder; name a file, such as result.json\n"),
        (
            ["check", "a.yaml", "--json", "a.yaml"],
            "--json a.yaml: it is there already and holds something else; name another",
        ),
        (["tune", "a.yaml", "--apply", "nofile.yaml"], "nofile.yaml: no such file"),
        (["tune", "a.yaml", "--budget", "-5s"], "tune: --budget '-5s' is not a duration of more than zero; write"),
        (["tune", "a.yaml", "--memory-limit", "-.5GiB"], "tune: --memory-limit '-.5GiB' is not a size in bytes; write"),
        (
            ["infer", "search", "a.yaml", "targets.tokens_per_s=9"],
            "first_token_s and tokens_per_s cannot be searched: a",
        ),
        (["tune", "a.yaml", "--verify", "--verify-pairs", "-2"], "--verify-pairs -2: an interval over pairs needs at"),
    ],
)
def test_wrong_usage_is_said_before_any_work(words, said, tmp_path, capsys):
    """A place for ``--json`` that is a folder was found out when the search was over."""
    assert run_words(*words) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.yaml"]


def test_the_catalogue_and_the_schema_know_every_lever(capsys):
    assert run_words("levers", "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert {x["name"]: x["key"] for x in document["levers"]} == {name: x.key for name, x in load_catalogue().items()}
    assert run_words("schema") == 0
    text = json.dumps(json.loads(capsys.readouterr().out))
    assert all(f'"{name}"' in text for name in load_catalogue())


@pytest.mark.parametrize("words", [("levers",), ("machine", "--no-roofs"), ("check", "a.yaml")])
def test_signs_that_an_encoding_lacks_are_written_as_others(words, monkeypatch):
    """``×`` ended a command with UnicodeEncodeError."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    assert run_words(*words) in (0, 3)
    print("8 × 2 ± 1 … é", file=out, flush=True)
    assert out.buffer.getvalue().decode("ascii").endswith("8 x 2 +- 1 ... ?\n")


@pytest.mark.parametrize("locale", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_plain_locale_gets_the_table_in_its_own_signs_and_json_in_utf_8(locale, monkeypatch):
    for name, value in {**locale, "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    ended = run_python("-m", "fulltilt", "levers", "--json", "-")
    assert (ended.returncode, ended.stderr) == (0, "")
    docs = " ".join(lever["doc"] for lever in json.loads(ended.stdout)["levers"])
    assert "batch_size × accumulate" in docs
    ended = run_python("-m", "fulltilt", "levers")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.isascii()


@pytest.mark.parametrize("command", ["schema", "levers"])
def test_a_reader_that_goes_away_ends_a_command_like_any_broken_pipe(command):
    """``tune … | head -1`` ended with rich's own exit code 1, which says that the search failed."""
    code = f"from fulltilt.cli import main; main(['{command}'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (EXIT_BROKEN_PIPE, "")


@pytest.mark.parametrize(
    "words",
    [
        ["x.yaml", "--num-workers", "0", "2", "run.epochs=1", "--batch-sizes", "32", "optim.lr=1", "--budget", "3s"],
        ["--num-workers", "0", "2", "x.yaml", "run.epochs=1", "optim.lr=1", "--budget", "3s", "--batch-sizes", "32"],
        ["--batch-sizes", "32", "--num-workers", "0", "run.epochs=1", "2", "optim.lr=1", "--config", "x.yaml"],
    ],
)
def test_a_list_flag_takes_its_numbers_and_leaves_the_overrides(words):
    args = build_parser("tune").parse_args(["tune", *words])
    assert (args.num_workers, args.batch_sizes) == ([0, 2], [32])
    named = [word for word in (args.config, args.config_flag) if word]
    assert sorted([*named, *args.overrides]) == ["optim.lr=1", "run.epochs=1", "x.yaml"]
    assert "x.yaml" in named


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train x.yaml optim.lr=1e-3 --device cpu run.seed=7", {"overrides": ["optim.lr=1e-3", "run.seed=7"]}),
        ("tune x.yaml optim.lr=1e-3 --device cpu run.seed=7", {"overrides": ["optim.lr=1e-3", "run.seed=7"]}),
        ("tune x.yaml --num-workers 0 --out runs/a=b", {"out": "runs/a=b", "num_workers": [0], "overrides": []}),
        ("contrastive --phases pretrain x.yaml run.epochs=1", {"phases": ["pretrain"], "overrides": ["run.epochs=1"]}),
        ("infer check x.yaml --weig runs/a run.seed=7", {"weights": "runs/a", "overrides": ["run.seed=7"]}),
    ],
)
def test_overrides_may_stand_anywhere(words, expected):
    command, *_ = words.split()
    args = build_parser(command).parse_args(words.split())
    assert args.config == "x.yaml"
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("def build():\n    raise ValueError('my shape is wrong; use 3')\n", "broken_model.py:2 in build"),
        ("\n\nraise ValueError('my shape is wrong; use 3')\n", "broken_model.py:3 as it was imported"),
    ],
)
def test_an_error_of_the_users_code_is_one_line_with_its_place_and_a_document(
    tmp_path, monkeypatch, capsys, own_tmpdir, code, place
):
    """It was up to 57 lines of traceback, most of them fulltilt's own."""
    (tmp_path / "broken_model.py").write_text(code)
    monkeypatch.delitem(sys.modules, "broken_model", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "a.yaml").write_text("model: broken_model:build\ndata: {dataset: digits}\nrun: {device: cpu}\n")
    assert run_words("train", "a.yaml", "--json", "-") == 1
    said, words = capsys.readouterr(), f"{place}: ValueError: my shape is wrong; use 3"
    log = Path("runs/train/a/traceback.log")
    assert said.err == f"fulltilt train: {words} (log: {log})\n"
    assert "raise ValueError(" in log.read_text()
    assert list(own_tmpdir.iterdir()) == []
    error = read_error(said.out)
    assert (error["error"], error["remedy"]) == (words, None)


@pytest.mark.parametrize("folder", ["libs", "."])
def test_the_users_line_is_found_wherever_torch_is_installed(tmp_path, monkeypatch, folder):
    """torch/serialization.py:776 was named where torch lay outside of site-packages."""
    torch = tmp_path / folder / "torch"
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__file__=str(torch / "__init__.py")))
    names = {}
    for file, code in ((torch / "serialization.py", "raise ValueError('gone')"), (tmp_path / "mine.py", "load()")):
        exec(compile(f"def {'read' if code == 'load()' else 'load'}():\n    {code}", str(file), "exec"), names)
    with pytest.raises(ValueError, match="gone") as caught:
        names["read"]()
    assert find_place(caught.value) == "mine.py:2 in read"


def test_an_error_of_fulltilt_itself_is_one_line_too_and_its_trace_a_file(monkeypatch, capsys, own_tmpdir):
    monkeypatch.setattr("fulltilt.cli.levers.FIELDS", ("name", "colour"))
    assert run_words("levers", "--json", "levers.json") == 1
    said = capsys.readouterr().err
    (log,) = own_tmpdir.iterdir()
    assert said == f"fulltilt levers: AttributeError: 'Lever' object has no attribute 'colour' (log: {log})\n"
    assert log.read_text().startswith("Traceback")


def test_what_the_users_code_prints_is_no_part_of_the_document(tmp_path, capsys):
    code = "print('hello from the import')\nfrom torch import nn\ndef build():\n    return nn.Flatten()\n"
    (tmp_path / "chatty_model.py").write_text(code)
    (tmp_path / "a.yaml").write_text("model: chatty_model:build\ndata: {dataset: digits}\nrun: {device: cpu}\n")
    run_words("check", "a.yaml", "--json", "-")
    said = capsys.readouterr()
    assert json.loads(said.out)["items"]
    assert "hello from the import" in said.err


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_end_no_command(closed):
    ended = subprocess.run(["bash", "-c", f'"$0" -m fulltilt levers threads {closed}', sys.executable])
    assert ended.returncode == 0


def test_a_full_disk_under_stdout_is_one_line_and_no_trace():
    for words in ([], ["--json", "-"]):
        with open("/dev/full", "w") as full:  # noqa: PTH123
            ended = run_python("-m", "fulltilt", "levers", *words, stdout=full)
        assert ended.returncode == 1
        assert ended.stderr == "fulltilt levers: No space left on device; make room and run it again\n"


def test_a_terminal_that_closes_ends_a_command_like_sigterm():
    ended = run_python(
        "-c",
        "import signal, fulltilt.cli as cli, fulltilt.cli.levers as levers\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup it is ignored
        "levers.run = lambda args: signal.raise_signal(signal.SIGHUP)\n"
        "raise SystemExit(cli.run_command(['levers']))",
    )
    assert (ended.returncode, ended.stderr) == (143, "fulltilt levers: terminated\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        *(([command, "nofile.yaml"], "nofile.yaml: no such file") for command in ("check", "tune", "train")),
        (["levers", "--colour=3"], "unrecognized arguments: --colour=3"),
    ],
)
def test_an_error_is_one_document_where_json_leads(words, text, capsys):
    """Nothing was written then, and what read it failed on that instead of on the error."""
    assert run_words(*words, "--json", "-") == 2
    said = capsys.readouterr()
    error = read_error(said.out)
    assert (error["command"], error["rc"]) == (words[0], 2)
    assert error["error"] in said.err
    assert text in error["error"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NoPlanError("no plan was run: too little time; give a larger --budget"), "give a larger --budget"),
        (NoPlanError("2 error. t1: cut; copy it. skipped: x; use y", remedy="copy it"), "copy it"),
        (TrainingError("the loss is nan; lower optim.lr (log: runs/a/logs/t1.log)"), "lower optim.lr"),
        (TrainingError("stopped; give more (or less)"), "give more (or less)"),
        (TrainingError("stopped (log: runs/a/logs/t1.log)"), None),
    ],
)
def test_an_error_says_its_remedy_apart_and_without_its_log(monkeypatch, capsys, error, remedy):
    raise_from(monkeypatch, "fulltilt.tuner.tune", error)
    assert run_words("tune", "a.yaml", "--json", "-") == error.exit_code
    expected = {"command": "tune", "error": str(error), "remedy": remedy, "rc": error.exit_code}
    assert read_error(capsys.readouterr().out) == expected


def test_a_file_that_must_not_be_written_is_refused_before_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fulltilt.tuner.tune", lambda *args, **options: pytest.fail("the search ran"))
    (tmp_path / "b.yaml").write_text("model: wideresnet\ndata: {dataset: digits}\n")
    assert run_words("tune", "a.yaml", "--apply", "b.yaml") == 2
    assert "b.yaml is of another workload" in capsys.readouterr().err
    (tmp_path / "a.yaml").chmod(0o444)
    assert run_words("tune", "a.yaml", "--apply", "a.yaml") == 1
    assert "a.yaml is not writable (mode 444)" in capsys.readouterr().err


def test_wrong_usage_leaves_the_result_of_an_earlier_run(tmp_path):
    result = tmp_path / "result.json"
    assert run_words("tune", "nofile.yaml", "--json", "result.json") == 2
    assert read_error(result.read_text())["rc"] == 2
    result.write_text("{}")
    for words in (["nofile.yaml"], ["a.yaml", "--colour=3"]):
        assert run_words("tune", *words, "--json", "result.json") == 2
    assert result.read_text() == "{}"


def test_a_result_that_was_written_is_not_followed_by_an_error(capsys, monkeypatch):
    """The table after it may fail: a second document would make the first one unreadable."""

    def fail(args):
        write_json(args.json, "{}")
        raise FulltiltError("the rest failed")

    monkeypatch.setattr("fulltilt.cli.levers.run", fail)
    assert run_words("levers", "--json", "-") == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("{}\n", "fulltilt levers: the rest failed\n")


def test_a_current_folder_that_is_gone_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run_words("train", "a.yaml") == 2
    assert capsys.readouterr().err == "fulltilt train: the current folder is gone; cd to one that is there\n"


def test_what_is_no_exception_of_the_usual_kind_is_one_line_too(monkeypatch, capsys):
    class Odd(BaseException):
        pass

    def fail(args):
        raise Odd("of the user's own")

    monkeypatch.setattr("fulltilt.cli.levers.run", fail)
    assert run_words("levers") == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"fulltilt levers: .*test_cli_main.py:\d+ in fail: Odd: of the user's own \(log: .*\)", said)


@pytest.mark.parametrize(
    ("raised", "how", "code"), [(KeyboardInterrupt, "interrupted", 130), (Terminated, "terminated", 143)]
)
@pytest.mark.parametrize(
    ("events", "kept"),
    [
        ((), "the search had not begun; the same command begins it, or goes on with the rows of an earlier run"),
        ((STARTED,), "no trial had ended yet, nothing was measured"),
        ((STARTED, DONE), "1 row is kept in runs/tune/a; the same command goes on"),
        (
            (dataclasses.replace(STARTED, n_resumed=2), RESUMED, RESUMED, DONE),
            "3 rows are kept in runs/tune/a; the same command goes on",
        ),
    ],
)
def test_an_interrupted_search_says_what_it_keeps(raised, how, code, events, kept, capsys, monkeypatch):
    """``what was measured is kept`` was said before there was a folder."""

    def search(*args, on_event, **options):
        for event in events:
            on_event(event)
        raise raised

    monkeypatch.setattr("fulltilt.tuner.tune", search)
    assert run_words("tune", "a.yaml", "--json", "-") == code
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"fulltilt tune: {how}: {kept}"
    error = read_error(said.out)
    assert (error["rc"], error["remedy"]) == (code, kept.partition("; ")[2] or None)


@pytest.mark.parametrize(
    ("command", "folder", "place", "early"),
    [
        ("train", "a", "fulltilt.engine.loop.train.train", "_choose_folder"),
        ("contrastive", "a/probe", "fulltilt.engine.contrastive.phases.run_phase", "_choose_folder"),
    ],
)
def test_an_interrupted_training_promises_to_resume_from_what_is_there(
    command, folder, place, early, tmp_path, monkeypatch, capsys
):
    """``--resume goes on from the newest checkpoint`` was said while there was none."""
    raise_from(monkeypatch, place, KeyboardInterrupt)
    words = [command, "a.yaml", "--out", "a", "--quiet"]
    assert run_words(*words) == 130
    assert capsys.readouterr().err == f"fulltilt {command}: interrupted: nothing was saved yet\n"
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "checkpoint.previous.pt").touch()
    assert run_words(*words, "--json", "-") == 130
    said = capsys.readouterr()
    remedy = "--resume goes on from the newest checkpoint"
    assert said.err == f"fulltilt {command}: interrupted: saved in {folder}; {remedy}\n"
    assert read_error(said.out)["remedy"] == remedy
    raise_from(monkeypatch, f"fulltilt.cli.{command}.{early}", KeyboardInterrupt)  # before there is a folder
    assert run_words(command, "a.yaml", "--quiet") == 130
    assert capsys.readouterr().err == f"fulltilt {command}: interrupted: training had not begun\n"


def test_another_contrastive_run_gets_a_folder_of_its_own_and_its_later_phases_find_it(monkeypatch, capsys):
    """The guide runs its script with other flags in a row; the second was refused."""
    went = []

    def run_phase(phase, config, *, out_dir, **_):
        went.append((phase, out_dir.name))
        claim = {"fingerprint_parts": opening._describe_run(config, None), "command": "train"}
        with RunFolder(out_dir / phase, results=opening._RESULTS, **claim):
            (out_dir / phase / opening.NEWEST).touch()
        return types.SimpleNamespace(metrics={}, out_dir=str(out_dir / phase))

    monkeypatch.setattr("fulltilt.engine.contrastive.phases.run_phase", run_phase)
    monkeypatch.setattr("fulltilt.cli.contrastive.write_json", lambda *_: None)
    config = str(Path(__file__).parents[3] / "configs" / "stl10_config.yaml")
    for words in (["pretrain"], ["pretrain", "warmup=1"], ["probe", "warmup=1"], ["probe"]):
        phase, *changed = words
        assert run_words("contrastive", config, *changed, "--phases", phase) == 0
    expected = [("pretrain", ""), ("pretrain", "-2"), ("probe", "-2"), ("probe", "")]
    assert went == [(phase, f"stl10_config{end}") for phase, end in expected]
    said = capsys.readouterr().out
    assert said.count("holds another run (changed: ") == 2
    assert run_words("contrastive", config, "warmup=2", "--resume") == 2
    assert "holds the results of another run" in capsys.readouterr().err


def test_an_interrupted_start_loads_no_torch_to_say_what_is_saved():
    ended = run_python(
        "-c",
        "import signal, sys, pathlib, fulltilt.cli as cli, fulltilt.cli.train as train\n"
        "def stop(args):\n"
        "    folders = [pathlib.Path('none')]\n"
        "    with train.note_interruption(lambda: train.describe_saved(folders)):\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "train.run = stop\n"
        "ended = cli.run_command(['train', 'a.yaml'])\n"
        "print(ended, 'torch' in sys.modules)",
    )
    assert (ended.stdout, ended.stderr) == ("143 False\n", "fulltilt train: terminated: nothing was saved yet\n")


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    """A file of 7 GiB was written for 99 s without a word into a log."""
    now = [0.0]
    monkeypatch.setattr(_shared.time, "monotonic", lambda: now[0])
    with show_progress("writing events.h5") as progress:
        for now[0], done in ((1.0, 10), (11.0, 50), (12.0, 60), (22.0, 100)):
            progress(done, 200)
    told = "writing events.h5: 25 % after 11 s\nwriting events.h5: 50 % after 22 s\n"
    assert capsys.readouterr().err == told


def test_a_bar_on_a_terminal_is_drawn_by_no_thread_and_gone_after_each_part(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stderr", stderr := FakeTerminal())
    now, n_threads = [0.0], threading.active_count()
    monkeypatch.setattr(_shared.time, "monotonic", lambda: now[0])
    with show_progress("encoding") as progress:
        for now[0], done in ((1.0, 50), (2.0, 100), (3.0, 25), (4.0, 100)):
            progress(done, 100, "labelled" if done == 50 else "")
            assert threading.active_count() == n_threads
            assert ("\x1b[1A" in stderr.getvalue()[-20:]) is (done == 100)  # the cursor went back up over the bar
    said = stderr.getvalue()
    assert " 50%" in said
    assert "encoding (labelled)" in said
    assert " 25%" in said
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l")


LEAVES = [
    leaf.prog.split()[1:] for command in COMMANDS for leaf in list_leaves(build_parser(command)) if command in leaf.prog
]


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_and_action_takes_quiet_or_verbose(words, capsys):
    assert run_words(*words, "--help") == 0
    said = capsys.readouterr().out
    assert "--quiet " in said
    assert "--verbose " in said


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    (folder / "a.yaml").write_text(CONFIG)
    with h5py.File(folder / "f.h5", "w") as file:
        file["input"] = np.zeros((400, 8), dtype=np.float32)
    for name, rates in (("a", [1000.0, 1004.0]), ("b", [1200.0, 1204.0])):
        (folder / f"{name}.json").write_text(json.dumps(build_search(rates)))
    words = ["train", "a.yaml", "device=cpu", "--epochs", "1", "batch_size=512", "--out", "run", "--quiet"]
    with contextlib.chdir(folder):
        assert run_words(*words) == 0
    return folder


@pytest.fixture
def results(made, tmp_path):
    """What some commands read: a YAML file, an HDF5 file, a training, and two results to compare."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("words", "sentence", "detail"),
    [
        (["machine", "--no-roofs"], "This machine has ", "python "),
        (["levers"], r"\d+ levers; ", "applied at: "),
        (["levers", "accumulate"], "accumulate: Micro-steps ", "applied at: "),
        (["check", "a.yaml", "device=cpu"], "Ready: ", "ok "),
        (["compare", "a.json", "b.json"], "B against A, of .* recommended: samples_per_s", "Figures"),
        (["data", "inspect", "f.h5", "--seconds", "0.02"], r"f\.h5: .* rows/s of random batches", "chunks"),
        (["export", "run", "w.safetensors"], r"w\.safetensors: \d+ tensors", "fulltilt.step: "),
        (["init"], "fulltilt init NAME writes", "digits "),
        (["init", "digits"], "digits.yaml is written", "is written"),
        (["report", "run"], "run/report.html", "run/report.html"),
        (["data", "make", "e.h5", "--n-samples", "8", "--n-sensors", "4"], "e.h5: 8 synthetic events", "events"),
        (["train", "a.yaml", "device=cpu", "--epochs", "1", "batch_size=512", "--out", "two"], "Finished: ", "files: "),
        (["train", "a.yaml", "device=cpu", "--profile-data"], ".* takes most, ", "samples timed"),
        (["doctor", "read", "slow.py"], "1 place in slow.py ", "fix: "),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, list) else "",
)
@pytest.mark.usefixtures("results")
def test_quiet_leaves_one_sentence_and_verbose_prints_the_details(words, sentence, detail, tmp_path, capsys):
    (tmp_path / "slow.py").write_text("for x in loader:\n    loss(x).backward()\n    print(loss.item())\n")
    capsys.readouterr()
    assert run_words(*words, "--quiet") == 0
    said = capsys.readouterr()
    assert re.fullmatch(f"{sentence}.*\n", said.out), said.out
    assert said.err == ""
    for made in ("w.safetensors", "digits.yaml", "e.h5"):
        (tmp_path / made).unlink(missing_ok=True)
    shutil.rmtree(tmp_path / "two", ignore_errors=True)
    assert run_words(*words, "--verbose") == 0
    assert detail in capsys.readouterr().out


def test_quiet_still_tells_errors_and_ends_with_its_command(capsys):
    assert run_words("check", "none.yaml", "--quiet") == 2
    assert "none.yaml" in capsys.readouterr().err
    assert run_words("levers", "accumulate") == 0
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert run_words("levers", "--quiet", "--verbose") == 2
    assert "--quiet and --verbose ask for opposites" in capsys.readouterr().err
