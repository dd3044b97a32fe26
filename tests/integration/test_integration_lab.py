"""The lab as a user runs it: a grid to its results; cancelled, interrupted, killed at random moments, resumed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import runpy
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.lab_cases import PATIENCE_S, build_points, lease, wait_for

from fulltilt import __version__
from fulltilt.cli import _lab_serve, run_command
from fulltilt.lab import listing, operations, serving
from fulltilt.lab.client import Client
from fulltilt.lab.executors import name_mark
from fulltilt.lab.executors.local import GUARD_MARK
from fulltilt.lab.records import Attempt, Point
from fulltilt.lab.serving import find_server, open_lab
from fulltilt.lab.serving import serve as serve_lab
from fulltilt.lab.states import ARROWS, LIVE
from fulltilt.lab.store import open_store

CONFIGS = Path(__file__).parents[2] / "configs"
STAND_IN = Path(__file__).parents[1] / "unit" / "lab" / "run_stand_in_lab.py"
STAND_IN_SERVER = STAND_IN.with_name("run_stand_in_server.py")
APP = Path(__file__).parents[2] / "app.py"
FULLTILT = (sys.executable, "-m", "fulltilt", "lab")


@pytest.fixture(scope="module", autouse=True)
def _no_gpu():
    """Four slots on the CPU, also where there is a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def lab_command(*words: object, folder: Path) -> list[str]:
    return [*FULLTILT, *map(str, words), "--lab", str(folder)]


def run(*words: object, folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(lab_command(*words, folder=folder), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def call(*words: object, folder: Path, code: int = 0) -> str:
    """The same command line in this process, which has loaded what it needs already."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        ended = run_command(["lab", *map(str, words), "--lab", str(folder)])
    text = said.buffer.getvalue().decode()
    assert ended == code, text
    return text


def list_experiments(folder: Path) -> dict[str, dict]:
    document = json.loads(call("list", "--json", "-", folder=folder))
    assert document["version"] == 1
    return {entry["id"]: entry for entry in document["experiments"]}


def find_processes(folder: Path) -> list[int]:
    """Living trainings of this lab."""
    found = []
    out = f"\0--out\0{folder.resolve()}/".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if out in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def read_events(folder: Path):
    with contextlib.closing(open_store(folder)) as store:
        return store.read_events()


def read_training(out_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (out_dir / "events.jsonl").read_text().splitlines()]


def assert_whole(folder: Path, n: int) -> None:
    """Every experiment succeeded once, by legal arrows, and nothing is left running."""
    states, accepted = {}, Counter()
    for event in read_events(folder):
        if event.arrow != "submit":
            assert states[event.experiment] in ARROWS[event.arrow].sources
        states[event.experiment] = event.state
        accepted[event.experiment] += event.arrow == "commit"
    assert list(states.values()) == ["succeeded"] * n
    assert set(accepted.values()) == {1}
    assert find_processes(folder) == []
    with contextlib.closing(sqlite3.connect(folder / "lab.db")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.fixture(scope="module")
def grid(tmp_path_factory) -> Path:
    """The guide's grid, run once."""
    folder = tmp_path_factory.mktemp("grid") / "lab"
    done = run("submit", "--local", CONFIGS / "parallel_grid.yaml", "epochs=1", folder=folder)
    (folder / "said.txt").write_text(done.stdout)
    return folder


@pytest.mark.slow
def test_the_guides_grid_succeeds_and_says_so(grid):
    said = (grid / "said.txt").read_text().splitlines()
    assert said[1].startswith(f"6 of 6 experiments wait in {grid}, at most 4 run at once on cpu:0, cpu:1, cpu:2, cpu:3")
    sentence = next(line for line in said if line.startswith("6 of 6 experiments succeeded in"))
    assert said[said.index(sentence) + 1].startswith("lowest loss: e")
    assert len(said[said.index(sentence) :]) == 9
    assert max(map(len, said[said.index(sentence) :])) <= 100
    assert_whole(grid, 6)


@pytest.mark.slow
def test_six_rows_are_there_before_anything_starts_and_four_run_while_two_wait(grid):
    events = read_events(grid)
    assert [event.arrow for event in events[:7]] == ["submit"] * 6 + ["lease"]
    running, most, waiting = set(), 0, []
    for event in events[6:]:
        (running.add if event.state in LIVE else running.discard)(event.experiment)
        if len(running) > most:
            most = len(running)
            waiting = {e.experiment for e in events} - running
    assert most == 4
    assert sorted(waiting) == ["e5", "e6"]
    assert [event.time_s for event in events] == sorted(event.time_s for event in events)


@pytest.mark.slow
def test_the_document_has_the_contracts_keys(grid):
    entries = list(list_experiments(grid).values())
    expected = {"id", "sweep", "state", "attempt", "priority", "point", "metrics", "node", "devices", "out_dir"}
    assert all(expected <= set(entry) for entry in entries)
    assert [entry["point"] for entry in entries] == [
        {"optim.lr": lr, "data.batch_size": size} for lr in (0.0001, 0.001, 0.01) for size in (64, 128)
    ]
    for entry in entries:
        assert (entry["sweep"], entry["state"], entry["attempt"]) == ("parallel_grid", "succeeded", 1)
        result = json.loads((Path(entry["out_dir"]) / "result.json").read_text())
        assert entry["metrics"] == result["metrics"]
        assert 0 < entry["metrics"]["accuracy"] <= 1
        assert entry["devices"][0] in {"cpu:0", "cpu:1", "cpu:2", "cpu:3"}
        assert entry["node"] == os.uname().nodename
        assert entry["n_threads"] >= 1
    by_lr = {entry["point"]["optim.lr"]: entry["metrics"]["loss"] for entry in entries}
    assert by_lr[0.01] < by_lr[0.0001]


@pytest.mark.slow
def test_the_same_command_again_starts_nothing_and_more_points_only_themselves(tmp_path):
    folder = tmp_path / "lab"
    words = ["submit", "--local", CONFIGS / "parallel_grid.yaml", "epochs=1", "batch_size=128", "device=cpu"]
    run(*words, "lr=[0.01]", folder=folder)
    before = read_events(folder)
    again = run(*words, "lr=[0.01]", "--json", tmp_path / "again.json", folder=folder)
    assert "there was nothing to start" in again.stdout
    assert len(json.loads((tmp_path / "again.json").read_text())["experiments"]) == 1
    more = run(*words, "lr=[0.01, 0.02]", folder=folder)
    assert "1 of 2 points are new" in more.stdout
    arrows = [event.arrow for event in read_events(folder)[len(before) :]]
    assert arrows == ["submit", "lease", "start", "finish", "commit"]


@pytest.mark.slow
def test_the_log_is_that_of_the_training_and_ids_that_are_none_or_over_are_refused(grid):
    said = call("logs", "e3", folder=grid)
    assert said.startswith("== e3, attempt 1 on cpu:")
    assert "optim.lr=0.001 data.batch_size=64" in said.splitlines()[0]
    assert "epoch 1/1" in said
    n = len(list_experiments(grid))
    assert f"there is no experiment 'e77'; there are {n}" in call("logs", "e77", folder=grid, code=2)
    assert "e2 is succeeded already; there is nothing to cancel" in call("cancel", "2", folder=grid, code=2)


@pytest.mark.slow
def test_a_followed_log_outlives_the_server_and_ends_with_the_experiment(tmp_path, monkeypatch):
    monkeypatch.setenv("STAND_IN_EVENTS", "1")  # takes a second an epoch
    monkeypatch.setenv("STAND_IN_TICKS", str(tmp_path))  # prints every step
    folder, config = tmp_path / "lab", tmp_path / "grid.yaml"
    config.write_text("epochs: [3, 1000]\n")
    folder.mkdir()
    with open_lab(folder, create=True) as lab:
        operations.submit(lab, source=str(config), text=config.read_text(), overrides=(), owner="")
    serve = [sys.executable, str(STAND_IN_SERVER), str(folder), "20", "1"]
    running, said = [], [(tmp_path / name).open("w+") for name in ("e1", "e2")]
    try:
        for id, out in zip(("e1", "e2"), said, strict=True):
            command = lab_command("logs", "-f", id, folder=folder)
            running.append(subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True))
            assert "not served now" in running[-1].stderr.readline(), "nothing holds the folder meanwhile"
        first, second = running
        running.append(subprocess.Popen(serve))
        wait_for(lambda: "step 10\n" in (tmp_path / "e1").read_text(), first)
        running[-1].kill()
        running[-1].wait()
        running.append(subprocess.Popen(serve))
        assert first.communicate(timeout=PATIENCE_S)[1] == ""
        assert first.returncode == 0
        assert (tmp_path / "e1").read_text() == (folder / "e1" / "log-1.txt").read_text()
        assert "step 150\nepoch 3: " in (tmp_path / "e1").read_text()
        wait_for(lambda: (tmp_path / "e2").read_text().startswith("== e2, attempt 1"), second)
        second.send_signal(signal.SIGINT)
        assert second.communicate(timeout=PATIENCE_S)[1] == "", "the usual end of following says nothing"
        assert second.returncode == 130
        Client(None, find_server(folder)).post("/api/experiments/e2/cancel")
        wait_for(lambda: not find_processes(folder), running[-1])
    finally:
        for process in running:
            process.kill()
            process.communicate()
        for out in said:
            out.close()


@pytest.mark.slow
def test_cancel_reaches_the_process_and_after_ctrl_c_the_same_command_goes_on(tmp_path):
    config, folder = tmp_path / "pair.yaml", tmp_path / "lab"
    config.write_text(
        "model: small_cnn\ndataset: digits\ntransform: normalize\nepochs: 30\nlr: [0.001, 0.002]\ndevice: [0, 1]\n"
    )
    submit = lab_command("submit", "--local", config, folder=folder)
    first = subprocess.Popen(submit, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for((folder / "lab.db").exists, first)
    both = wait_for(lambda: [e for e in list_experiments(folder).values() if e["metrics"]][1:], first)
    assert len(both) == 1
    with contextlib.closing(open_store(folder)) as store:
        pids = {found.id: found.pid for found in store.read_experiments()}  # of the runners
    assert call("cancel", "e1", folder=folder) == "e1 (lr=0.001) is cancelled\n"
    wait_for(lambda: not Path(f"/proc/{pids['e1']}").exists(), first)
    assert Path(f"/proc/{pids['e2']}").exists()
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=PATIENCE_S)
    assert first.returncode == 130
    assert f"interrupted: 1 cancelled, 1 queued, kept in {folder}; the same command goes on" in said
    assert find_processes(folder) == []
    step = max(event.get("step", 0) for event in read_training(folder / "local" / "e2"))
    second = run("submit", "--local", config, folder=folder, code=1)
    assert "1 of 2 experiments succeeded, 1 cancelled; --retry tries again" in second.stdout
    entries = list_experiments(folder)
    assert (entries["e1"]["state"], entries["e1"]["attempt"]) == ("cancelled", 1)
    assert (entries["e2"]["state"], entries["e2"]["attempt"]) == ("succeeded", 2)
    starts = [event for event in read_training(folder / "e2") if event["event"] == "RunStarted"]
    assert [event["first_step"] for event in starts] == [0, step]


@pytest.mark.timeout(60)
def test_a_cancel_without_a_server_is_noted_for_the_next_one_and_the_command_ends(tmp_path, capsys):
    with open_lab(tmp_path, create=True) as lab:
        lab.store.add("/somewhere/grid.yaml", build_points(1), [])
        attempt, _ = lease(lab.store, lab.store.read_experiments()[0], node=os.uname().nodename, engine="local")
        lab.store.advance("start", attempt)
        environ = {**os.environ, GUARD_MARK: name_mark(lab.store.read_experiments()[0])}
    training = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"], env=environ)
    try:
        assert run_command(["lab", "cancel", "e1", "--lab", str(tmp_path)]) == 0
    finally:
        training.kill()
        training.wait()
    assert capsys.readouterr().out == "e1 (lr=0) is cancelling\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: small_cnn\ndataset: cifar10(root=nowhere)\nlr: [1, 2]\n", "nowhere does not exist; give the folder"),
        pytest.param(
            "model: [small_cnn, smal_cnn]\ndataset: digits\n", "did you mean small_cnn", marks=pytest.mark.slow
        ),
        ("model: small_cnn\ndataset: digits\nlr: [1, -2]\n", "grid.yaml:3: optim.lr: lr -2"),
    ],
)
def test_what_cannot_run_is_refused_before_a_row_is_written(tmp_path, capsys, text, said):
    (tmp_path / "grid.yaml").write_text(text)
    words = ["lab", "submit", "--local", str(tmp_path / "grid.yaml"), "--lab", str(tmp_path / "lab")]
    assert run_command(words) == 2
    assert said in capsys.readouterr().err
    if (tmp_path / "lab").exists():
        assert not read_events(tmp_path / "lab")


GRID = "lr: [0.1, 0.2, 0.3]\nbatch_size: [1, 2]\ndevice: [0, 1, 2, 3]\n"


def kill_at_random_moments(command, new_folder, seed: int, *, n_kills: int, longest_s: float) -> None:
    """Kill the process group of the scheduler ``n_kills`` times; each lab then runs to its end, whole."""
    random_s, folder, n_labs, n_running = random.Random(seed), new_folder(0), 1, 0
    for n_kill in range(n_kills):
        process = subprocess.Popen(command(folder), start_new_session=True, stdout=subprocess.DEVNULL)
        if n_kill % 2:  # every other time not before trainings run, however slow the machine is
            wait_for(lambda: find_processes(folder) or process.poll() is not None)  # noqa: B023
        try:
            code = process.wait(timeout=random_s.uniform(0, longest_s))
        except subprocess.TimeoutExpired:
            n_running += bool(find_processes(folder))
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        else:
            assert (code, seed, n_kill) == (0, seed, n_kill)
            assert_whole(folder, 6)
            folder, n_labs = new_folder(n_labs), n_labs + 1
    subprocess.run(command(folder), check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)
    assert_whole(folder, 6)
    print(f"seed {seed}: {n_kills} kills or ends, {n_running} with trainings under way, {n_labs} labs")
    assert n_running


@pytest.mark.slow
def test_killed_at_any_moment_six_results_each_once(tmp_path, monkeypatch):
    (tmp_path / "grid.yaml").write_text(GRID)
    monkeypatch.setenv("STAND_IN_STEPS", "100")
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    kill_at_random_moments(
        lambda folder: [sys.executable, str(STAND_IN), str(tmp_path / "grid.yaml"), str(folder)],
        lambda n: tmp_path / f"lab{n}",
        seed,
        n_kills=10,
        longest_s=2.0,
    )


@contextlib.contextmanager
def serve(*command: object, folder: Path):
    """A server of the folder in a process of its own, and where it is reached."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, wait_for(lambda: find_server(folder), process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


def serve_stand_in(folder: Path, *, n_devices: int = 2):
    return serve(sys.executable, STAND_IN_SERVER, folder, 30, n_devices, folder=folder)


def count_states(folder: Path) -> dict[str, int]:
    with contextlib.closing(open_store(folder)) as store:
        return store.count_states()


@pytest.mark.slow
def test_a_backup_of_a_running_queue_goes_on_elsewhere_and_nothing_is_missing(tmp_path, monkeypatch, capfd):
    (tmp_path / "grid.yaml").write_text("lr: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]\n")
    (folder := tmp_path / "lab").mkdir()
    new = tmp_path / "new"
    monkeypatch.setenv("STAND_IN_STEPS", "100")
    with serve_stand_in(folder) as (process, _):
        assert run_command(["lab", "submit", str(tmp_path / "grid.yaml"), "--lab", str(folder)]) == 0
        wait_for(lambda: {"succeeded", "running"} <= {*count_states(folder)}, process)
        assert run_command(["lab", "backup", str(tmp_path / "lab.tar"), "--lab", str(folder)]) == 0
        assert "6 experiments and " in capfd.readouterr().out
        wait_for(lambda: count_states(folder) == {"succeeded": 6}, process)
    assert run_command(["lab", "restore", str(tmp_path / "lab.tar"), "--lab", str(new)]) == 0
    assert "what ran then is queued again" in capfd.readouterr().out
    before = {id: entry for id, entry in list_experiments(new).items() if entry["state"] == "succeeded"}
    assert 0 < len(before) < 6
    with serve_stand_in(new) as (process, _):
        wait_for(lambda: count_states(new) == {"succeeded": 6}, process)
    after = list_experiments(new)
    assert all(entry["metrics"] == {"loss": 1 / 100, "steps": 100} for entry in after.values())
    assert all(after[id] == before[id] for id in before), "what was done is not done again"
    assert_whole(new, 6)
    lines = [json.loads(line) for line in (new / "server.log").read_text().splitlines()]
    told = [(line["experiment"], line["state"]) for line in lines if line["event"] == "state"]
    assert len(set(told)) == len(told) == 4 * (6 - len(before)), "each change of state once"
    assert (lines[0]["event"], lines[-1]["event"]) == ("started", "ended")


@pytest.mark.slow
def test_tokens_work_from_elsewhere_and_are_in_no_output(tmp_path, monkeypatch, capfd):
    (tmp_path / "grid.yaml").write_text("lr: [0.1, 0.666]\n")
    (folder := tmp_path / "lab").mkdir()
    (folder / "token").touch(mode=0o600)
    (folder / "token").write_text("canary-of-the-owner\n")
    outputs = []

    def call(*words: str, at: tuple[str, ...] = ("--lab", str(folder)), code: int = 0) -> str:
        assert run_command(["lab", *words, *at]) == code
        said = capfd.readouterr()
        if words[:2] != ("token", "create"):
            outputs.append((said.out + said.err).encode())
        return said.out + said.err

    with serve_stand_in(folder) as (process, address):
        tokens = {role: call("token", "create", "--role", role, "--quiet").strip() for role in ("read", "submit")}
        elsewhere = ("--url", address.url, "--lab", str(tmp_path / "none"))
        monkeypatch.setenv("FULLTILT_LAB_TOKEN", tokens["submit"])
        call("submit", str(tmp_path / "grid.yaml"), at=elsewhere)
        monkeypatch.setenv("FULLTILT_LAB_TOKEN", tokens["read"])
        assert "a token for 'read' may not do this" in call("cancel", "e1", at=elsewhere, code=2)
        wait_for(lambda: count_states(folder) == {"succeeded": 1, "failed": 1}, process)
        for words in (
            ("list",),
            ("list", "--json", "-"),
            ("show", "e1"),
            ("show", "e2", "--json", "-"),
            ("export", "-"),
        ):
            call(*words, at=elsewhere)
        scraped = httpx.get(f"{address.url}/metrics", headers={"Authorization": f"Bearer {tokens['read']}"})
        assert 'fulltilt_lab_attempts_ended_total{outcome="succeeded"} 1.0' in scraped.text
        assert "fulltilt_lab_turn_seconds_count 0.0" not in scraped.text
        assert httpx.get(f"{address.url}/metrics", headers={"Authorization": "Bearer canary-guess"}).status_code == 401
        listed = call("token", "list").splitlines()
        assert (listed[0], len(listed)) == ("2 tokens beside the owner's", 3)
        call("token", "remove", listed[1].partition(":")[0])
        assert "the token is not known" in call("list", at=elsewhere, code=2)
        call("backup", str(tmp_path / "lab.tar"))
    outputs += [scraped.content, (tmp_path / "lab.tar").read_bytes()]
    outputs += [path.read_bytes() for path in folder.rglob("*") if path.is_file() and path != folder / "token"]
    for secret in (*tokens.values(), "canary"):
        assert not any(secret.encode() in output for output in outputs)
    assert b'"refused", "route": "GET /metrics", "status": 401' in (folder / "server.log").read_bytes()


def test_prune_names_what_it_would_remove_and_then_removes_it(tmp_path, capfd):
    points = [Point(values={"optim.lr": n}, config={}, digest=str(n)) for n in range(2)]
    with contextlib.closing(open_store(tmp_path, create=True)) as store:
        store.add("/somewhere/grid.yaml", points, [])
        store.advance("drop", Attempt(experiment="e1", number=0))

    def prune(*words: str, code: int = 0) -> str:
        assert run_command(["lab", "prune", *words, "--lab", str(tmp_path)]) == code
        return "".join(capfd.readouterr())

    assert prune("--older-than", "1h").startswith("0 experiments are removed")
    assert prune("--older-than", "1ms", "--dry-run") == "1 experiments would be removed\ne1\n"
    assert prune("--older-than", "1ms", "--state", "failed", "succeeded").startswith("0 experiments are removed")
    assert count_states(tmp_path) == {"cancelled": 1, "queued": 1}
    assert prune("--older-than", "1ms", "--state", "cancelled").startswith("1 experiments are removed")
    assert count_states(tmp_path) == {"queued": 1}
    assert "is not a duration" in prune("--older-than", "soon", code=2)


@pytest.mark.parametrize(
    ("words", "is_warned", "host"),
    [
        ("--engine ray --host 0.0.0.0", False, r"\d+\.\d+\.\d+\.\d+"),
        ("--engine ray --host 0.0.0.0 --allow-host lab.example", False, r"lab\.example"),
        ("--engine ray", True, r"127\.0\.0\.1"),
        ("--engine ray --allow-host lab.example", True, r"lab\.example"),
        ("--engine slurm --host 0.0.0.0", True, None),
        ("--engine local", False, None),
    ],
)
def test_serve_says_how_others_reach_it_and_its_document_too(tmp_path, monkeypatch, capfd, words, is_warned, host):
    monkeypatch.setattr(_lab_serve, "catch_signals", lambda signals: contextlib.nullcontext(True))  # ends at once
    monkeypatch.setattr(_lab_serve, "require_ray", lambda: None)
    monkeypatch.setitem(_lab_serve.ENGINES, "slurm", lambda args, logs: [])
    command = f"lab serve {words} --devices {'0,1' if 'local' in words else 'none'} --port 0 --insecure-lan --json -"
    assert run_command([*command.split(), "--lab", str(tmp_path / "lab")]) == 0
    printed = capfd.readouterr()
    document, said = json.loads(printed.out), " ".join(printed.err.split())
    assert ("other machines cannot reach it there" in said) == is_warned
    assert f"is served at {document['url']}; devices" in said
    assert Path(document["token_file"]).read_text().strip()
    if "local" in words:
        assert document["devices"] == {os.uname().nodename: ["cpu:0", "cpu:1"]}
    if host is None:
        assert document["join"] is None
        assert "lab work" not in said
        return
    join = re.fullmatch(rf"fulltilt lab work --url http://({host}):\d+ --join-token (\S+)", document["join"])
    assert f"another machine joins, once and within ten minutes: {document['join']} " in said
    with contextlib.closing(open_store(tmp_path / "lab")) as store:
        assert store.find_token(join[2]).role == "join"


def test_logs_export_backup_and_restore_have_a_document_each(tmp_path, capfdbinary):
    folder, copy = tmp_path / "lab", tmp_path / "copy"
    folder.mkdir()
    with open_lab(folder, create=True) as lab:
        lab.store.add("/somewhere/grid.yaml", build_points(1), [])
        (folder / "e1").mkdir()
        for number, data in ((1, b"one \xff\n"), (2, "zwölf\n".encode())):
            attempt, _ = lease(lab.store, lab.store.read_experiments()[0])
            (folder / "e1" / f"log-{number}.txt").write_bytes(data)
            lab.store.advance("requeue", attempt)
        lab.store.advance("drop", attempt)

    def read(*words: str, at: Path = folder) -> bytes:
        assert run_command(["lab", *words, "--json", "-", "--lab", str(at)]) == 0
        return capfdbinary.readouterr().out

    attempts = [{"attempt": 1, "text": "one \ufffd\n"}, {"attempt": 2, "text": "zwölf\n"}]
    assert json.loads(read("logs", "e1")) == {"version": 1, "id": "e1", "attempts": attempts}
    assert [json.loads(line) for line in read("logs", "-f", "e1").splitlines()] == attempts
    assert run_command(["lab", "logs", "e1", "--json", str(tmp_path / "log.json"), "--lab", str(folder)]) == 0
    assert capfdbinary.readouterr().out == b"one \xff\n" + "zwölf\n".encode()
    assert json.loads((tmp_path / "log.json").read_text())["attempts"] == attempts
    assert read("export", str(tmp_path / "all.csv")) == read("list")
    assert (tmp_path / "all.csv").read_text().startswith("id,sweep,state,attempt,")
    made = json.loads(read("backup", str(tmp_path / "lab.tar")))
    assert (made["version"], made["states"], made["n_files"], made["n_missing"]) == (1, {"cancelled": 1}, 0, 0)
    assert json.loads(read("restore", str(tmp_path / "lab.tar"), at=copy)) == made


def test_a_server_of_another_version_is_refused_with_both_and_what_to_do(tmp_path, monkeypatch, capfd):
    with open_lab(tmp_path, create=True) as lab, serving.serve(lab, []) as (address, _):
        monkeypatch.setenv("FULLTILT_LAB_TOKEN", address.token)
        assert run_command(["lab", "list", "--url", address.url]) == 0
        monkeypatch.setattr("fulltilt.lab.client.VERSION", 2)
        assert run_command(["lab", "list", "--url", address.url]) == 2
    said = f"the lab at {address.url} speaks version 1 (fulltilt {__version__}), and this is version 2"
    assert said in capfd.readouterr().err


def test_the_guides_server_without_devices_serves(tmp_path):
    folder = tmp_path / "lab"
    command = (sys.executable, APP, "--server-only", "--port", "0", "--lab", folder)
    with serve(*command, folder=folder) as (process, address):
        assert httpx.get(f"{address.url}/healthz").json() == {"status": "ok"}
        nodes = httpx.get(f"{address.url}/api/nodes", headers={"Authorization": f"Bearer {address.token}"}).json()
        assert nodes == {"nodes": []}
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--port 9000", "lab serve --port 9000"),
        ("--server-only --host 0.0.0.0", "lab serve --devices none --host 0.0.0.0"),
        ("--client-only --url http://server:8000 --join-token T", "lab work --url http://server:8000 --join-token T"),
    ],
)
def test_the_guides_app_is_a_door_to_the_commands(monkeypatch, words, expected):
    given = []
    monkeypatch.setattr("fulltilt.cli.main", given.append)
    monkeypatch.setattr(sys, "argv", [str(APP), *words.split()])
    runpy.run_path(str(APP), run_name="__main__")
    assert given == [expected.split()]


def test_a_list_asks_for_what_it_shows_and_says_what_no_machine_can_run(tmp_path, monkeypatch):
    built, build = [], listing.build_entry
    monkeypatch.setattr(listing, "build_entry", lambda *given: built.append(given) or build(*given))
    monkeypatch.chdir(tmp_path)
    with open_lab(Path(), create=True) as lab, serve_lab(lab, []) as (address, _):
        lab.store.add(tmp_path / "grid.yaml", build_points(40), [], n_devices=2)
        lab.store.advance("drop", lab.store.read_experiments(id="e1")[0].newest)
        monkeypatch.setenv("FULLTILT_LAB_TOKEN", address.token)
        sentence, _, *rows, more = call("list", "--url", address.url, folder=tmp_path).splitlines()
    assert sentence.startswith("1 cancelled, 39 queued in ")
    assert [row.split()[0] for row in rows] == [f"e{n}" for n in range(2, 18)]
    assert all("no machine here has 2 devices" in row for row in rows)
    assert (more, len(built)) == ("24 more: --verbose", 16)
    assert built[0][0] == tmp_path.resolve(), "shown where it is, wherever the server was started"
    assert "no machine" not in call("list", folder=tmp_path), "without a server nobody knows the machines"
