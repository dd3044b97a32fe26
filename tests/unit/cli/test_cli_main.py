import dataclasses
import json
import subprocess
import sys

import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.cli import COMMANDS, EXIT_BROKEN_PIPE, Terminated, _shared, build_parser, parse_arguments, run_command
from fulltilt.cli._shared import show_progress, write_json
from fulltilt.errors import FulltiltError, NoPlanError, TrainingError
from fulltilt.levers import default_plan, load_catalogue
from fulltilt.tuner import SearchStarted, TrialDone

STARTED = SearchStarted(strategy="s", grid_size=4, n_planned=4, n_resumed=0, device="cpu", folder="runs/tune/a")
TRIAL = SimulatedTarget(lambda plan: Answer(samples_per_s=1.0))(default_plan(), id="t1", why="")
DONE = TrialDone(trial=TRIAL, n_done=1, n_planned=4, seconds_left=None)
RESUMED = dataclasses.replace(DONE, is_resumed=True)


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command([command, "--help"])
    assert ended.value.code == 0
    assert f"fulltilt {command}" in capsys.readouterr().out


def test_no_command_is_wrong_usage(capsys):
    assert run_command([]) == 2
    assert "COMMAND" in capsys.readouterr().out


def test_an_unknown_flag_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["levers", "--colour"])
    assert ended.value.code == 2
    assert "--colour" in capsys.readouterr().err


def test_flags_are_not_guessed_from_their_beginning(capsys):
    with pytest.raises(SystemExit):
        build_parser("tune").parse_args(["tune", "x.yaml", "--batch", "3"])
    assert "--batch" in capsys.readouterr().err


def test_the_catalogue_lists_every_lever_with_its_key(capsys):
    assert run_command(["levers", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {lever["name"]: lever["key"] for lever in document["levers"]} == {
        name: lever.key for name, lever in load_catalogue().items()
    }


def test_an_unknown_lever_is_answered_with_the_nearest(capsys):
    assert run_command(["levers", "num_worker"]) == 2
    assert "did you mean num_workers" in capsys.readouterr().err


def test_the_schema_is_json_and_knows_the_levers(capsys):
    assert run_command(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    text = json.dumps(schema)
    assert all(lever.key.split(".")[1] in text for lever in load_catalogue().values())


def test_a_missing_configuration_is_wrong_usage(capsys):
    assert run_command(["train"]) == 2
    assert "no configuration was given" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_traceback():
    code = "from fulltilt.cli import main; main(['schema'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
    assert "Traceback" not in said


def test_a_table_whose_reader_goes_away_ends_like_any_broken_pipe():
    """``tune … | head -1`` ended with rich's own exit code 1, which says that the search failed."""
    code = "from fulltilt.cli import main; main(['levers'])"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        said = process.stderr.read().decode()
    assert (process.returncode, said) == (EXIT_BROKEN_PIPE, "")


@pytest.mark.parametrize("command", ["train", "tune"])
def test_overrides_may_stand_anywhere(command):
    words = [command, "x.yaml", "optim.lr=1e-3", "--device", "cpu", "run.seed=7"]
    args = parse_arguments(build_parser(command), words)
    assert args.config == "x.yaml"
    assert args.overrides == ["optim.lr=1e-3", "run.seed=7"]


@pytest.mark.parametrize(
    "words",
    [
        ["x.yaml", "--num-workers", "0", "2", "run.epochs=1", "--batch-sizes", "32", "optim.lr=1", "--budget", "3s"],
        ["--num-workers", "0", "2", "x.yaml", "run.epochs=1", "optim.lr=1", "--budget", "3s", "--batch-sizes", "32"],
        ["--batch-sizes", "32", "--num-workers", "0", "run.epochs=1", "2", "optim.lr=1", "--config", "x.yaml"],
    ],
)
def test_a_list_flag_takes_its_numbers_and_leaves_the_overrides(words):
    args = parse_arguments(build_parser("tune"), ["tune", *words])
    assert (args.num_workers, args.batch_sizes) == ([0, 2], [32])
    named = [word for word in (args.config, args.config_flag) if word]
    assert sorted([*named, *args.overrides]) == ["optim.lr=1", "run.epochs=1", "x.yaml"]
    assert "x.yaml" in named


def test_a_value_of_another_flag_may_hold_an_equals_sign():
    args = parse_arguments(build_parser("tune"), ["tune", "x.yaml", "--num-workers", "0", "--out", "runs/a=b"])
    assert (args.out, args.num_workers, args.overrides) == ("runs/a=b", [0], [])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "-5s"], "--budget '-5s' is not a duration of more than zero; write for instance 90s or 6m"),
        (["--memory-limit", "-.5GiB"], "--memory-limit '-.5GiB' is not a size in bytes; write a number and its unit"),
        (["--verify", "--verify-pairs", "-2"], "--verify-pairs -2: an interval over pairs needs at least 2"),
    ],
)
def test_a_value_below_0_is_no_flag_and_is_refused_in_one_line(tmp_path, capsys, words, message):
    assert run_command(["tune", "configs/digits.yaml", *words, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fulltilt tune: {message}")
    assert said.count("\n") == 1


def test_a_word_that_is_no_number_is_named_with_its_list_flag(capsys):
    with pytest.raises(SystemExit):
        parse_arguments(build_parser("tune"), ["tune", "x.yaml", "--batch-sizes", "32", "many"])
    assert "--batch-sizes: invalid int value: 'many'" in capsys.readouterr().err


def test_phases_of_contrastive_leave_the_overrides():
    words = ["contrastive", "--phases", "pretrain", "x.yaml", "run.epochs=1"]
    args = parse_arguments(build_parser("contrastive"), words)
    assert (args.phases, args.config, args.overrides) == (["pretrain"], "x.yaml", ["run.epochs=1"])


def test_a_stray_word_is_still_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["levers", "--json", "-", "batch_size", "--colour=3"])
    assert ended.value.code == 2
    assert "--colour=3" in capsys.readouterr().err


def test_a_json_folder_that_is_not_there_is_said_before_the_work(tmp_path, capsys):
    target = tmp_path / "none" / "result.json"
    assert run_command(["levers", "--json", str(target)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not target.parent.exists()


def test_a_json_place_that_is_a_folder_is_said_before_the_work(tmp_path, monkeypatch, capsys):
    """It was found out when the search was over, and the remedy was another ``--out``."""
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.tune", lambda *args, **options: pytest.fail("the search ran"))
    (tmp_path / "results").mkdir()
    place = tmp_path / "results"
    assert run_command(["tune", str(tmp_path / "a.yaml"), "--json", str(place)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"fulltilt tune: --json {place}: it is a folder; name a file, such as {place / 'result.json'}"
    assert not list(place.iterdir())


def test_a_file_to_apply_to_is_looked_at_before_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    assert run_command(["tune", "a.yaml", "--apply", "nofile.yaml"]) == 2
    assert "nofile.yaml: no such file" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_an_error_of_the_users_code_ends_in_one_line_under_its_trace(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_model.py").write_text("def build():\n    raise ValueError('my shape is wrong')\n")
    (tmp_path / "a.yaml").write_text("model: broken_model:build\ndata: {dataset: digits}\nrun: {device: cpu}\n")
    assert run_command(["train", "a.yaml", "--quiet"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == "fulltilt train: ValueError: my shape is wrong"
    assert any("broken_model.py" in line for line in said)


def test_a_full_disk_under_stdout_is_one_line_and_no_trace():
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run(
            [sys.executable, "-m", "fulltilt", "levers"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["fulltilt levers: No space left on device; make room and run it again"]


def test_a_terminal_that_closes_ends_a_command_like_sigterm():
    code = (
        "import signal, fulltilt.cli as cli, fulltilt.cli.levers as levers\n"
        "levers.run = lambda args: signal.raise_signal(signal.SIGHUP)\n"
        "raise SystemExit(cli.run_command(['levers']))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (143, "fulltilt levers: terminated\n")


def read_error(text):
    document = json.loads(text)
    assert document.pop("version") == 1
    return document


@pytest.mark.parametrize("command", ["check", "tune", "train"])
def test_an_error_is_one_document_where_json_leads(command, capsys):
    """Nothing was written then, and what read it failed on that instead of on the error."""
    assert run_command([command, "nofile.yaml", "--json", "-"]) == 2
    said = capsys.readouterr()
    error = read_error(said.out)
    assert (error["command"], error["rc"]) == (command, 2)
    assert error["error"] in said.err
    assert "nofile.yaml: no such file" in error["error"]


def test_an_error_says_its_remedy_apart(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.tune", _end_without_a_plan)
    destination = tmp_path / "result.json"
    assert run_command(["tune", str(tmp_path / "a.yaml"), "--json", str(destination)]) == 3
    assert capsys.readouterr().out == ""
    assert read_error(destination.read_text()) == {
        "command": "tune", "error": "no plan was run: too little time; give a larger --budget",
        "remedy": "give a larger --budget", "rc": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NoPlanError("2 error. t1: cut; copy it. skipped: x; use y", remedy="copy it"), "copy it"),
        (TrainingError("the loss is nan; lower optim.lr (log: runs/a/logs/t1.log)"), "lower optim.lr"),
        (TrainingError("stopped; give more (or less)"), "give more (or less)"),
        (TrainingError("stopped (log: runs/a/logs/t1.log)"), None),
    ],
)
def test_a_remedy_is_the_errors_own_and_without_its_log(tmp_path, monkeypatch, capsys, error, remedy):
    def fail(*args, **options):
        raise error

    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.tune", fail)
    assert run_command(["tune", str(tmp_path / "a.yaml"), "--json", "-"]) == error.exit_code
    document = read_error(capsys.readouterr().out)
    assert (document["error"], document["remedy"]) == (str(error), remedy)


def test_a_file_that_must_not_be_written_is_refused_before_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fulltilt.tuner.tune", _end_without_a_plan)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    (tmp_path / "b.yaml").write_text("model: wideresnet\ndata: {dataset: digits}\n")
    assert run_command(["tune", str(tmp_path / "a.yaml"), "--apply", str(tmp_path / "b.yaml")]) == 2
    assert "b.yaml is of another workload" in capsys.readouterr().err
    (tmp_path / "a.yaml").chmod(0o444)
    assert run_command(["tune", str(tmp_path / "a.yaml"), "--apply", str(tmp_path / "a.yaml")]) == 1
    assert "a.yaml is not writable (mode 444)" in capsys.readouterr().err


def _end_without_a_plan(*args, **options):
    raise NoPlanError("no plan was run: too little time; give a larger --budget")


def test_wrong_flags_are_a_document_too(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(["levers", "--json", "-", "--colour=3"])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert read_error(said.out) | {"error": ""} == {"command": "levers", "error": "", "remedy": None, "rc": 2}
    assert "unrecognized arguments: --colour=3" in said.err


@pytest.mark.parametrize("words", [["--json", "--quick"], ["--colour", "--", "--json", "place"]])
def test_a_flag_is_no_place_for_a_document(words, tmp_path, monkeypatch, capsys):
    """``--json --quick`` wrote a file of the name ``--quick``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        run_command(["tune", "a.yaml", *words])
    assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_leaves_the_result_of_an_earlier_run(tmp_path, capsys):
    result = tmp_path / "result.json"
    assert run_command(["tune", "nofile.yaml", "--json", str(result)]) == 2
    assert read_error(result.read_text())["rc"] == 2
    result.write_text("{}")
    assert run_command(["tune", "nofile.yaml", "--json", str(result)]) == 2
    with pytest.raises(SystemExit):
        run_command(["tune", "a.yaml", "--json", str(result), "--colour=3"])
    assert result.read_text() == "{}"


def test_an_error_of_the_users_code_is_a_document_too(capsys, monkeypatch):
    def fail(args):
        raise ValueError("expected 3 channels; got 1")

    monkeypatch.setattr("fulltilt.cli.levers.run", fail)
    assert run_command(["levers", "--json", "-"]) == 1
    error = read_error(capsys.readouterr().out)
    assert (error["error"], error["remedy"]) == ("ValueError: expected 3 channels; got 1", None)


def test_a_result_that_was_written_is_not_followed_by_an_error(capsys, monkeypatch):
    """The table after it may fail: a second document would make the first one unreadable."""

    def fail(args):
        write_json(args.json, "{}")
        raise FulltiltError("the rest failed")

    monkeypatch.setattr("fulltilt.cli.levers.run", fail)
    assert run_command(["levers", "--json", "-"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("{}\n", "fulltilt levers: the rest failed\n")


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
def test_an_interrupted_search_says_what_it_keeps(raised, how, code, events, kept, tmp_path, capsys, monkeypatch):
    """``what was measured is kept`` was said before there was a folder."""

    def search(*args, on_event, **options):
        for event in events:
            on_event(event)
        raise raised

    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.tuner.tune", search)
    assert run_command(["tune", str(tmp_path / "a.yaml"), "--json", "-"]) == code
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == f"fulltilt tune: {how}: {kept}"
    error = read_error(said.out)
    assert (error["rc"], error["remedy"]) == (code, kept.partition("; ")[2] or None)


def _interrupt(*args, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "folder", "place"),
    [
        ("train", "a", "fulltilt.engine.loop.train.train"),
        ("contrastive", "a/probe", "fulltilt.engine.contrastive.phases.run_phase"),
    ],
)
def test_an_interrupted_training_promises_to_resume_from_what_is_there(
    command, folder, place, tmp_path, monkeypatch, capsys
):
    """``--resume goes on from the newest checkpoint`` was said while there was none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr(place, _interrupt)
    words = [command, "a.yaml", "--out", "a", "--quiet"]
    assert run_command(words) == 130
    assert capsys.readouterr().err == f"fulltilt {command}: interrupted: nothing was saved yet\n"
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "checkpoint.previous.pt").touch()
    assert run_command([*words, "--json", "-"]) == 130
    said = capsys.readouterr()
    remedy = "--resume goes on from the newest checkpoint"
    assert said.err == f"fulltilt {command}: interrupted: saved in {folder}; {remedy}\n"
    assert read_error(said.out)["remedy"] == remedy


def test_a_training_that_is_interrupted_before_its_folder_is_known_promises_nothing(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    monkeypatch.setattr("fulltilt.engine.build.assemble.name_run", _interrupt)
    assert run_command(["train", str(tmp_path / "a.yaml"), "--quiet"]) == 130
    assert capsys.readouterr().err == "fulltilt train: interrupted: training had not begun\n"


def test_an_interrupted_start_loads_no_torch_to_say_what_is_saved(tmp_path):
    (tmp_path / "a.yaml").write_text("model: small_cnn\ndata: {dataset: digits}\n")
    code = (
        "import signal, sys, pathlib, fulltilt.cli as cli, fulltilt.cli.train as train\n"
        "def stop(args):\n"
        "    with train.note_checkpoints() as folders:\n"
        "        folders.append(pathlib.Path('none'))\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "train.run = stop\n"
        f"ended = cli.run_command(['train', {str(tmp_path / 'a.yaml')!r}])\n"
        "print(ended, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.stdout, ended.stderr) == ("143 False\n", "fulltilt train: terminated: nothing was saved yet\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("tune", "wall time of the search; rows in the run folder are free, the trainings of --verify come on top"),
        ("compare", "Two trainings may differ in their recipe, optimizer included"),
    ],
)
def test_help_says_what_holds(command, words, capsys):
    with pytest.raises(SystemExit):
        run_command([command, "--help"])
    assert words in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["tune"], ["data", "inspect", "f.h5"], []])
def test_an_unknown_flag_shows_how_its_own_command_is_used(words, capsys):
    with pytest.raises(SystemExit):
        run_command([*words, "--dry"])
    said = capsys.readouterr().err
    command = " ".join(["fulltilt", *words[:2]])
    assert said.startswith(f"usage: {command} [-h]")
    assert f"{command}: error: unrecognized arguments: --dry" in said


def test_progress_is_told_in_lines_where_there_is_no_terminal(capsys, monkeypatch):
    """A file of 7 GiB was written for 99 s without a word into a log."""
    now = [0.0]
    monkeypatch.setattr(_shared.time, "monotonic", lambda: now[0])
    with show_progress("writing events.h5", total=200) as progress:
        for now[0], done in ((1.0, 10), (11.0, 50), (12.0, 60), (22.0, 100)):
            progress(done, 200)
    assert capsys.readouterr().err.splitlines() == [
        "writing events.h5: 25 % after 11 s",
        "writing events.h5: 50 % after 22 s",
    ]
