"""One attempt on its node: what the training is given, what the server is told, and that nothing outlives a lease."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

import pytest
from tests.lab_cases import PATIENCE_S, Bench, wait_for

from fulltilt.config import Config
from fulltilt.engine import interrupt
from fulltilt.errors import StorageError, UsageError
from fulltilt.hardware.proctree import find_marked, kill_processes, read_process
from fulltilt.lab import versions
from fulltilt.lab.executors.local import LocalExecutor
from fulltilt.lab.operations import act
from fulltilt.lab.records import Code, Node, Point
from fulltilt.lab.runner import renewal, shipping
from fulltilt.lab.runner.guard import FENCED, Deadline
from fulltilt.lab.runner.link import FencedError
from fulltilt.lab.runner.shipping import CUT, Shipping, _Stream
from fulltilt.lab.scheduling.leases import Term
from fulltilt.lab.serving import Tls, open_lab, serve
from fulltilt.lab.snapshot import pack_code

TTL_S = 2.0


@pytest.fixture
def bench(request, tmp_path):
    """A lab whose leases last long enough for a busy machine, unless the test says how long."""
    ttl_s = getattr(request, "param", 30.0)
    (tmp_path / "lab").mkdir()
    term = Term(ttl_s=ttl_s, grace_s=0.1 * ttl_s)
    with open_lab(tmp_path / "lab", create=True, term=term) as lab, serve(lab, []) as (address, _):
        yield Bench(lab, address.url, tmp_path)


def test_a_training_runs_to_its_result_and_the_server_has_its_log_and_files(bench):
    guard, mark = bench.start(STAND_IN_STEPS="20", with_worker=True)
    assert guard.wait(PATIENCE_S) == 0
    found = bench.read()
    assert (found.state, found.outcome, found.metrics["steps"]) == ("succeeded", "succeeded", 20)
    assert bench.read_log(1) == ["== e1, attempt 1 on cpu:0: grid.yaml", "from step 0: optim.lr=0.001"]
    assert (bench.lab.folder / "e1" / "counter").read_text() == "20", "a file of the result, sent by digest"
    assert find_marked(mark) == []
    assert "token" not in (bench.lab.folder / "e1" / "log-1.txt").read_text()


def test_a_cancel_reaches_the_training_which_saves_first(bench):
    guard, mark = bench.start(STAND_IN_STEPS="100000")
    counter = bench.root / "node" / "e1" / "counter"
    wait_for(counter.exists)  # before it hears no signal
    act(bench.lab, "cancel", "e1")
    assert guard.wait(PATIENCE_S) == 0
    assert (bench.read().state, bench.read().reason) == ("cancelled", "cancelled")
    assert int(counter.read_text()) > 0
    assert find_marked(mark) == []


def test_the_next_attempt_goes_on_from_the_checkpoint_also_on_a_node_that_shares_no_disk(bench):
    guard, _ = bench.start(STAND_IN_STEPS="100000", STAND_IN_CHECKPOINT="checkpoint.pt")
    wait_for(lambda: bench.lab.store.read_artefacts("e1"))
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(PATIENCE_S) == 0
    assert (bench.read().state, bench.read().outcome) == ("queued", "preempted")
    reached = int((bench.root / "node" / "e1" / "checkpoint.pt").read_text())
    checkpoint = {"STAND_IN_CHECKPOINT": "checkpoint.pt", "STAND_IN_STEPS": str(reached + 20)}
    guard, _ = bench.start(root=bench.root / "another", **checkpoint)
    assert guard.wait(PATIENCE_S) == 0
    assert bench.read().state == "succeeded"
    assert bench.read_log(2)[1] == f"from step {reached}: optim.lr=0.001"


def test_a_node_that_shares_no_disk_keeps_its_files_below_a_folder_of_its_own(bench, tmp_path):
    own = tmp_path / "cache"
    guard, _ = bench.start(root=Path("lab-1/n1"), STAND_IN_STEPS="100000", XDG_CACHE_HOME=str(own))
    counter = own / "fulltilt" / "lab-1" / "n1" / "e1" / "counter"
    wait_for(counter.exists)
    guard.send_signal(signal.SIGTERM)
    assert guard.wait(PATIENCE_S) == 0
    assert bench.read().outcome == "preempted"


SAVES = """
import sys, time
from pathlib import Path
from fulltilt.engine.interrupt import catch_signals
out = Path(sys.argv[sys.argv.index("--out") + 1])
with catch_signals() as stop:
    (out / "begun").touch()
    while not stop:
        time.sleep(0.02)
    time.sleep(1.0)
    (out / "saved").touch()
sys.exit(143)
"""


def test_a_signal_to_every_process_of_an_attempt_is_one_wish_to_save_and_end(bench):
    """As Slurm ends a job: the training hears it itself, and again from its runner, which hears of it twice."""
    guard, mark = bench.start(command=(sys.executable, "-c", SAVES))
    wait_for((bench.root / "node" / "e1" / "begun").exists)
    (training,) = find_marked(mark)
    runner = int(Path(f"/proc/{training}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(training, signal.SIGTERM)
    time.sleep(3 * interrupt.ECHO_S)
    for pid in (runner, guard.pid):
        os.kill(pid, signal.SIGTERM)
    assert guard.wait(PATIENCE_S) == 0
    assert (bench.root / "node" / "e1" / "saved").exists()
    assert bench.read().outcome == "preempted"


def test_an_attempt_that_another_one_has_followed_is_fenced_and_writes_nothing_more(bench):
    guard, mark = bench.start(STAND_IN_STEPS="100000")
    wait_for(lambda: find_marked(mark))
    first = bench.read().newest
    bench.lab.store.advance("back_off", first, outcome="lost")
    bench.lab.store.advance("wake", first)
    assert guard.wait(PATIENCE_S) == FENCED
    assert find_marked(mark) == []
    assert (bench.read().state, bench.read().attempt, bench.read().outcome) == ("queued", 1, "lost")


@pytest.mark.parametrize("who", ["guard", "runner", "training"])
def test_whoever_is_killed_nothing_is_left_of_the_attempt(bench, who):
    guard, mark = bench.start(STAND_IN_STEPS="100000", with_worker=True)
    training = wait_for(lambda: find_marked(mark))[0]
    runner = int(Path(f"/proc/{training}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill({"guard": guard.pid, "runner": runner, "training": training}[who], signal.SIGKILL)
    guard.wait(PATIENCE_S)
    wait_for(lambda: not find_marked(mark))
    for pid in (runner, training):
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}/exe").exists())
    if who == "training":
        assert (bench.read().outcome, bench.read().reason[:20]) == ("lost", "it was ended by SIGK")


HIDES = """
import subprocess, sys, time
hidden = subprocess.Popen(["env", "-i", "sleep", "3600"], start_new_session=True)
print("hidden", hidden.pid, flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["cancelled", "runner killed", "ended by the engine"])
def test_a_child_that_left_the_session_and_cleared_its_environment_ends_with_its_attempt(bench, how):
    guard, mark = bench.start(command=(sys.executable, "-S", "-c", HIDES))
    log = bench.lab.folder / "e1" / "log-1.txt"
    hidden = int(wait_for(lambda: log.exists() and re.findall(r"hidden (\d+)\n", log.read_text()))[0])
    (training,) = find_marked(mark)
    try:
        assert Path(f"/proc/{hidden}/exe").exists()
        if how == "cancelled":
            guard.send_signal(signal.SIGSTOP)  # the runner sees to it by itself before it says that all is over
            act(bench.lab, "cancel", "e1")
            wait_for(lambda: bench.read().state == "cancelled")
        elif how == "runner killed":
            os.kill(read_process(training).parent_pid, signal.SIGKILL)
            guard.wait(PATIENCE_S)
        else:
            attempt = dataclasses.replace(bench.read(), fence=mark.rpartition("/")[2])
            LocalExecutor("cpu", logs=bench.root).cancel(attempt, is_urgent=True)
        assert not Path(f"/proc/{hidden}/exe").exists()
    finally:
        kill_processes([hidden])
        guard.send_signal(signal.SIGCONT)
        guard.wait(PATIENCE_S)


@pytest.mark.parametrize("bench", [TTL_S], indirect=True)
def test_a_runner_that_is_stopped_does_not_keep_its_training_past_the_lease(bench):
    guard, mark = bench.start(STAND_IN_STEPS="100000")
    training = wait_for(lambda: bench.read().state == "running" and find_marked(mark))[0]
    runner = int(Path(f"/proc/{training}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(runner, signal.SIGSTOP)
    try:
        wait_for(lambda: not find_marked(mark))
        assert guard.wait(PATIENCE_S) == 128 + signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(runner, signal.SIGCONT)


SUSPEND = """
import os, sys, time
from fulltilt.lab.runner import guard
read, slept_s = time.clock_gettime, time.monotonic() + 1
deadline = guard.Deadline(guard.read_clock_s() + 600)
if (runner := os.fork()) == 0:
    time.sleep(10)
    os._exit(0)
time.clock_gettime = lambda clock: read(clock) + 3600 * (clock == time.CLOCK_BOOTTIME and time.monotonic() > slept_s)
sys.exit(guard.watch(runner, deadline))
"""


def test_time_in_which_the_machine_was_suspended_counts_for_the_deadline():
    """Where a suspend moves one clock alone, and every other goes on as if nothing had been."""
    assert subprocess.run([sys.executable, "-c", SUSPEND]).returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("bench", [TTL_S], indirect=True)
def test_a_server_that_is_gone_is_no_failure_until_the_lease_runs_out(bench, monkeypatch):
    """The training saves and ends by itself when no renewal is confirmed any more."""
    guard, mark = bench.start(STAND_IN_STEPS="100000")
    wait_for(lambda: find_marked(mark))
    monkeypatch.setattr(bench.lab.leases, "renew", refuse)
    began_s = time.monotonic()
    wait_for(lambda: not find_marked(mark))
    assert time.monotonic() - began_s > 0.4 * TTL_S
    assert int((bench.root / "node" / "e1" / "counter").read_text()) > 0
    guard.wait(PATIENCE_S)


class Line:
    """A server that wants nothing, and after some renewals nothing more to do with the attempt."""

    waited_s: tuple[float, ...] = ()

    def __init__(self, order):
        pass

    def greet(self, *, pid: int) -> dict:
        return {"wait_s": 0.01, "end_after_s": 1.0, "grace_s": 1.0}

    def renew(self, *, wait_s: float) -> None:
        if len(Line.waited_s) == 10:
            raise FencedError
        Line.waited_s += (wait_s,)


def test_renewals_that_began_together_do_not_stay_together(monkeypatch):
    monkeypatch.setattr(renewal, "Link", Line)
    renewing = renewal.Renewal(Line(None), None, Deadline(0.0))
    renewing.begin()
    wait_for(lambda: renewing.is_fenced)
    assert len(set(Line.waited_s)) == 10
    assert all(0.008 <= wait_s <= 0.012 for wait_s in Line.waited_s)


def refuse(attempt) -> None:
    raise StorageError("no space left")


def test_log_bytes_arrive_exactly_once_whatever_they_are(bench, tmp_path):
    blob = tmp_path / "blob"
    blob.write_bytes(os.urandom(3 << 20) + b"\0\xff\r\n" * 1000)
    guard, _ = bench.start(STAND_IN_STEPS="5", STAND_IN_PRINTS=str(blob))
    assert guard.wait(PATIENCE_S) == 0
    log = (bench.lab.folder / "e1" / "log-1.txt").read_bytes()
    assert log.endswith(blob.read_bytes())
    assert len(log) == len(b"== e1, attempt 1 on cpu:0: grid.yaml\nfrom step 0: optim.lr=0.001\n") + blob.stat().st_size


@pytest.mark.parametrize("bench", [TTL_S], indirect=True)
def test_a_cancel_ends_a_training_that_hears_no_signal(bench):
    guard, mark = bench.start(STAND_IN_STEPS="100000", STAND_IN_DEAF="1", with_worker=True)
    wait_for(lambda: bench.read().state == "running" and find_marked(mark))
    act(bench.lab, "cancel", "e1")
    assert guard.wait(PATIENCE_S) == 0
    assert (bench.read().state, find_marked(mark)) == ("cancelled", [])


@pytest.mark.parametrize("bench", [TTL_S], indirect=True)
def test_a_cancel_of_a_runner_that_hears_nothing_takes_effect_with_the_end_of_its_lease(bench):
    guard, mark = bench.start(STAND_IN_STEPS="100000")
    training = wait_for(lambda: bench.read().state == "running" and find_marked(mark))[0]
    os.kill(int(Path(f"/proc/{training}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGSTOP)
    act(bench.lab, "cancel", "e1")
    while bench.read().state == "cancelling":
        had_ended = not find_marked(mark)
        time.sleep(0.02)
    assert (bench.read().state, had_ended) == ("cancelled", True), "it was dead before the server said so"
    guard.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("error", "outcome", "said"),
    [
        ("g.yaml: model: no module 'mine' in /x; put it there", "user_error", "on n1: g.yaml: model: no module 'mine'"),
        ("importing mine failed: no module named y; install what it imports", "user_error", "on n1: importing mine"),
        ("no space left for /x/checkpoint.pt; free some and try again", "infra_refused", "no space left for /x"),
        ("lr -1: expected a number above 0", "user_error", "lr -1"),
    ],
)
def test_an_error_says_where_it_was_where_that_is_the_question(bench, error, outcome, said):
    guard, _ = bench.start(STAND_IN_ERROR=error)
    assert guard.wait(PATIENCE_S) == 0
    assert bench.read().outcome == outcome
    assert bench.read().reason.startswith(said)


def test_a_node_with_other_versions_trains_nothing_and_the_experiment_is_tried_elsewhere(bench, monkeypatch):
    own = versions.read_versions()
    monkeypatch.setattr(versions, "read_versions", lambda: own | {"torch": "9.9", "ray": "9.9"})
    bench.lab.store.meet_node(Node(name="n1", boot="first", versions={}, devices=[]))
    guard, _ = bench.start()
    assert guard.wait(PATIENCE_S) == FENCED
    found, (node,) = bench.read(), bench.lab.store.read_nodes()
    assert (found.state, found.outcome, node.n_bad) == ("backoff", "infra_refused", 1)
    assert found.reason.startswith(f"torch {own['torch']} on n1 and 9.9 on the server; install the same")
    assert not (bench.lab.folder / "e1" / "log-1.txt").exists()


RESULT = """
import json, sys
with open(sys.argv[sys.argv.index("--json") + 1], "w") as stream:
    json.dump({"reason": "finished", "metrics": {METRICS}}, stream)
"""


@pytest.mark.parametrize(
    ("metrics", "state", "said"),
    [("'loss': float('nan')", "succeeded", ""), ("'x' * 300: 1.0", "failed", "its result is not taken: body.metrics")],
)
def test_a_result_that_the_server_will_never_take_keeps_no_device(bench, metrics, state, said):
    guard, _ = bench.start(command=(sys.executable, "-S", "-c", RESULT.replace("METRICS", metrics)))
    assert guard.wait(PATIENCE_S) == 0
    assert bench.read().state == state
    assert (bench.read().reason or "").startswith(said)


FOLDERS = """
import sys
import tarfile
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
(out / "tensorboard" / "run").mkdir(parents=True)
(out / "tensorboard" / "run" / "events").write_text("scalars")
"""


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_folder_of_a_result_is_handed_in_as_one_file_or_else_left_where_it_is(bench, is_taken):
    script = FOLDERS + ("(out / 'tensorboard.tar').write_text('of the training')\n" if is_taken else "")
    script += RESULT.replace("METRICS", "'loss': 1.0")
    guard, _ = bench.start(command=(sys.executable, "-S", "-c", script))
    assert guard.wait(PATIENCE_S) == 0
    assert bench.read().state == "succeeded"
    own, sent = bench.root / "node" / "e1" / "tensorboard", bench.lab.folder / "e1" / "tensorboard.tar"
    assert (own / "run" / "events").exists() == is_taken
    assert (f"not handed in, and left on n1: {own} (" in "\n".join(bench.read_log(1))) == is_taken
    if not is_taken:
        with tarfile.open(sent) as tar:
            assert tar.extractfile("tensorboard/run/events").read() == b"scalars"


def test_of_a_folder_that_is_too_large_no_part_is_packed(tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "MOST_FOLDER_BYTES", 3)
    for name, text in (("out/large/run/events", "1234"), ("out/small/events", "123"), ("notes/log.txt", "")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    packed, (left,) = shipping.pack_result_folders(tmp_path / "out", tmp_path / "notes")
    assert (packed, "large (more than" in left) == ([tmp_path / "notes" / "small.tar"], True)


def test_a_node_trains_the_code_that_was_submitted_and_not_its_own(bench, tmp_path, monkeypatch):
    """The module lies at the root of the project and not beside its configuration, as where it was submitted from.

    A server that cannot answer at first is no failure.
    """
    has, asked = bench.lab.depot.has, []

    def look_later(digest: str) -> bool:
        asked.append(digest)
        if len(asked) == 1:
            raise StorageError("no space left")
        return has(digest)

    project = tmp_path / "project"
    (project / "configs").mkdir(parents=True)
    source = project / "configs" / "grid.yaml"
    source.write_text("lr: 1\n")
    (project / "models.py").write_text("print('as submitted', flush=True)\n")
    archive = pack_code(project, source)
    code = Code(digest=hashlib.sha256(archive).hexdigest(), root=str(project), entry="configs/grid.yaml")
    bench.lab.depot.put_pieces([archive], code.digest)
    (project / "models.py").write_text("print('edited since')\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "models.py").write_text("print('own')\n")
    point = Point(values={}, config=Config().to_values(), digest="d2")
    bench.lab.store.add(source, [point], [], code=code)
    monkeypatch.setattr(bench.lab.depot, "has", look_later)
    guard, _ = bench.start(id="e2", command=(sys.executable, "-c", "import models"), PYTHONPATH=str(tmp_path / "own"))
    assert guard.wait(PATIENCE_S) == 0
    assert (bench.lab.folder / "e2" / "log-1.txt").read_text().splitlines()[1:] == ["as submitted"]
    assert len(asked) > 1


def test_data_that_is_put_in_place_after_a_failure_is_seen_by_the_next_attempt(bench, tmp_path):
    project, states = tmp_path / "project", []
    project.mkdir()
    (project / "grid.yaml").write_text("lr: 1\n")
    archive = pack_code(project, project / "grid.yaml")
    code = Code(digest=hashlib.sha256(archive).hexdigest(), root=str(project), entry="grid.yaml")
    bench.lab.depot.put_pieces([archive], code.digest)
    point = Point(values={}, config=Config().to_values(), digest="d2")
    bench.lab.store.add(project / "grid.yaml", [point], [], code=code)
    script = "open('words.csv')\n" + RESULT.replace("METRICS", "'loss': 1.0")
    for _ in range(2):
        guard, _ = bench.start(id="e2", command=(sys.executable, "-S", "-c", script))
        assert guard.wait(PATIENCE_S) == 0
        states.append(bench.lab.store.read_experiments(id="e2")[0].state)
        if states == ["failed"]:
            (project / "words.csv").write_text("a word")
            act(bench.lab, "retry", "e2")
    assert states == ["failed", "succeeded"]


class FullPipe:
    """A server to which a training prints faster than anybody can send."""

    def __init__(self, log: Path):
        self.log, self.n_committed = log, 0

    def append(self, name: str, offset: int, data: bytes) -> int:
        with self.log.open("ab") as stream:
            stream.write(data)
        return offset + len(data)

    def send(self, path: Path) -> Path:
        return path

    def commit_checkpoint(self, files) -> None:
        self.n_committed += 1


def test_a_log_that_never_ends_keeps_no_checkpoint_waiting(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("more")
    link = FullPipe(log)
    shipping = Shipping(link, log=log, out_dir=tmp_path, renewal=None)
    (tmp_path / "checkpoint.pt").write_text("weights")
    assert shipping._ship(), "there is more"
    assert link.n_committed == 1


def test_a_log_is_cut_where_it_is_too_long_and_says_so(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"\xff" * 25)
    stream, sent = _Stream("log.txt", log, 0, 20), b""
    while piece := stream.read():
        sent += piece
        stream.n_sent = len(sent)
    assert sent == b"\xff" * 20 + CUT


class OpenPipe:
    """A server that takes all."""

    def __init__(self):
        self.taken = b""

    def append(self, name: str, offset: int, data: bytes) -> int:
        self.taken += data
        return offset + len(data)


@pytest.mark.parametrize(("most", "left"), [(8 << 20, 1 << 20), (3 << 20, 0)])
def test_what_has_arrived_of_a_log_or_never_will_takes_no_room_on_the_node(tmp_path, monkeypatch, most, left):
    """Apart from its last part, which a server may lose and ask for again."""
    monkeypatch.setattr(shipping, "KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(shipping, "MOST_LOG_BYTES", most)
    log, text, link = tmp_path / "log.txt", os.urandom(4 << 20), OpenPipe()
    log.write_bytes(text)
    with log.open("ab", buffering=0) as training:
        Shipping(link, log=log, out_dir=tmp_path, renewal=None)._ship()
        assert link.taken == (text if left else text[:most] + CUT)
        assert 512 * log.stat().st_blocks < left + (1 << 20)
        training.write(b"more")
    assert log.read_bytes()[len(text) - left :] == text[len(text) - left :] + b"more"


def test_a_certificate_that_is_none_is_told_and_nothing_is_left_running(tmp_path):
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("no certificate")
    tls = Tls(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    n_threads = threading.active_count()
    with (
        open_lab(tmp_path, create=True) as lab,
        pytest.raises(UsageError, match=r"cert\.pem and .* cannot be used"),
        serve(lab, [], tls=tls),
    ):
        pass
    assert threading.active_count() == n_threads
