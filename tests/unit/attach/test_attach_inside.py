"""The parts that run inside a watched script, each on its own."""

import io
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from fulltilt.attach.inside import files as files_module
from fulltilt.attach.inside import held as held_module
from fulltilt.attach.inside import spans as spans_module
from fulltilt.attach.inside.blocks import MAX_ROUNDS, N_SETTLING, N_TIMED, PRESENT, PRESENT_AGAIN, REMOVED, Blocks
from fulltilt.attach.inside.files import WINDOW_STEPS, FileCalls
from fulltilt.attach.inside.samples import LineTimes
from fulltilt.attach.inside.spans import BACKWARD, FILE_WRITE, FORWARD, OPTIMIZER, Spans


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    now = [0]
    monkeypatch.setattr(spans_module, "perf_counter_ns", lambda: now[0])
    return now


def test_a_nested_stretch_owns_its_time(clock):
    spans = Spans()
    spans.enter(OPTIMIZER)
    clock[0] = 10
    spans.enter(FORWARD)
    clock[0] = 25
    assert spans.leave() == 15
    clock[0] = 30
    assert spans.leave() == 30
    totals_ns = spans.cut(30)
    assert (totals_ns[OPTIMIZER], totals_ns[FORWARD], sum(totals_ns)) == (15, 15, 30)


def test_a_step_that_ends_inside_a_stretch_divides_it(clock):
    """The update of a parameter inside the backward pass, say: the pass goes on in the next step."""
    spans = Spans()
    spans.enter(BACKWARD)
    clock[0] = 10
    spans.enter(OPTIMIZER)
    clock[0] = 14
    assert spans.cut(14)[BACKWARD] == 10
    clock[0] = 20  # between: the observer's own work
    spans.go_on(20)
    clock[0] = 21
    spans.leave()
    clock[0] = 25
    spans.leave()
    totals_ns = spans.cut(25)
    assert (totals_ns[OPTIMIZER], totals_ns[BACKWARD]) == (1, 4)


@pytest.mark.parametrize("knows_epoch", [True, False])
def test_blocks_balance_their_arms_and_stay_inside_an_epoch(knows_epoch):
    """Blocks that begin too late in an epoch of unknown length are broken off, and run again."""
    blocks, epoch_steps, rows = Blocks(), 23, []
    blocks.start()
    for step in itertools.count():
        n_left = epoch_steps - 1 - step % epoch_steps
        blocks.plan_step(step % epoch_steps == 0, n_left if knows_epoch else None)
        if blocks.round == MAX_ROUNDS and not blocks.block:
            break
        rows.append((blocks.round, blocks.block, blocks.arm, blocks.is_timed))
        assert not knows_epoch or n_left or blocks.arm != REMOVED, "the last step of an epoch has the site"
    whole = {}
    for round_, block, arm, is_timed in rows:
        if is_timed:
            whole.setdefault(round_, {}).setdefault(block, []).append(arm)
    assert len(whole) == MAX_ROUNDS
    for round_, found in whole.items():
        arms = [arms[0] for arms in found.values() if len(arms) == N_TIMED]
        other = PRESENT_AGAIN if round_ % 3 == 0 else REMOVED
        assert arms in ([PRESENT, other, other, PRESENT], [other, PRESENT, PRESENT, other])
        assert not knows_epoch or len(found) == 4, "none is broken off"
    firsts = [next(iter(found.values()))[0] for found in whole.values()]
    assert 0 < firsts.count(PRESENT) < MAX_ROUNDS, "the order is drawn by lot"
    first_steps = [row for before, row in itertools.pairwise(rows) if row[1] != before[1]]
    assert not any(is_timed for *_, is_timed in first_steps), f"{N_SETTLING} step after each switch is not timed"


class FakeObserver:
    """What FileCalls needs of the observer: who asks, which step it is, and the stretches of time."""

    def __init__(self):
        self.thread, self.pid, self.step, self.spans = threading.get_ident(), os.getpid(), 0, Spans()
        self.left_out_ns = 0

    def leave_out(self, ns):
        self.left_out_ns += ns


@pytest.fixture
def calls(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "MIN_TIME_SHARE", 0.0)
    (tmp_path / "session").mkdir()
    calls = FileCalls(FakeObserver(), str(tmp_path / "session"))
    calls.wrap_open()
    calls.wrap_dumps()
    yield calls
    calls.settle()
    files_module.builtins.open = files_module.io.open = calls._open_real
    torch.save = calls._save_real
    json.dump, pickle.dump = json.dump.__wrapped__, pickle.dump.__wrapped__
    while KEPT_OPEN:
        os.close(KEPT_OPEN.popitem()[1])


KEPT_OPEN = {}
"""Path → the descriptor by which a test reads a file beside its writes."""


def rewrite_json(path, step):
    with open(path, "w") as file:
        assert isinstance(file, io.TextIOWrapper)
        json.dump({"step": step, "more": list(range(step))}, file, indent=1)
    with pytest.raises(ValueError, match="closed"):
        file.write("too late")


def rewrite_pickle(path, step):
    with open(path, "wb") as file:
        pickle.dump({"step": step}, file)
        file.write(bytearray(b"tail"))


def rewrite_text(path, step):
    Path(path).write_text(f"step {step}\n" * step)


def save_tensors(path, step):
    torch.save({"weights": torch.full((10,), float(step))}, path)


def append_line(path, step):
    with open(path, "a", encoding="UTF-8", newline="") as file:
        file.write(f"{step},ß\r\n")


def write_what_cannot_be_encoded(path, step):
    with open(path, "w", encoding="ascii") as file:
        file.write(f"{step} ")
        try:
            file.write("ß")
        except UnicodeEncodeError:
            file.write("ss")


def replace_whole(path, step):
    with open(f"{path}.new", "w") as file:
        file.write(str(step))
    os.replace(f"{path}.new", path)


def write_twice(path, step):
    rewrite_text(path, step)
    append_line(path, step)


def read_it_too(path, step):
    rewrite_json(path, step)
    with open(path) as file:
        assert json.load(file)["step"] == step


def ask_for_its_size(path, step):
    rewrite_text(path, step)
    assert os.path.getsize(path) == len(f"step {step}\n") * step


def sync_it(path, step):
    with open(path, "w") as file:
        file.write("x" * step)
        file.flush()
        os.fsync(file.fileno())


def change_what_was_written(path, step):
    state = {"step": step}
    with open(path, "w") as file:
        json.dump(state, fp=file)
    state.clear()


def ask_for_the_position(path, step):
    with open(path, "a") as file:
        file.write(f"{step}\n")
        file.write(f"at {file.tell()}\n")


def look_while_it_is_open(path, step):
    with open(path, "a") as file:
        file.write("before ")
        os.path.getsize(path)
        file.write(f"after {step}\n")


def count_in_another_process(path, step):
    append_line(path, step)
    said = subprocess.run(["wc", "-l", path], capture_output=True, text=True, check=True).stdout
    assert int(said.split()[0]) == step


def read_by_another_name(path, step):
    rewrite_text(path, step)
    other = f"{path}.link"
    if not os.path.lexists(other):
        os.symlink(path, other)
    descriptor = os.open(other, os.O_RDONLY)
    assert os.read(descriptor, 10**6) == f"step {step}\n".encode() * step
    os.close(descriptor)


def read_by_a_descriptor_that_stays_open(path, step):
    rewrite_text(path, step)
    if path not in KEPT_OPEN:
        KEPT_OPEN[path] = os.open(path, os.O_RDONLY)
    assert os.pread(KEPT_OPEN[path], 10**6, 0) == f"step {step}\n".encode() * step


def leave_it_open(path, step):
    json.dump([step], open(path, "w"))  # noqa: SIM115


QUIET = [
    *(rewrite_json, rewrite_pickle, rewrite_text, save_tensors, append_line, change_what_was_written, leave_it_open),
    write_what_cannot_be_encoded,
]
LOOKING = [
    *(read_it_too, ask_for_its_size, sync_it, ask_for_the_position, look_while_it_is_open),
    *(count_in_another_process, read_by_another_name, read_by_a_descriptor_that_stays_open),
]


def take_steps(calls, write, path, n_steps, *, held=()):
    """Run ``write`` at every step; in the steps of ``held`` the file may be held back → how often it was."""
    n_held = 0
    for step in range(1, n_steps + 1):
        calls._observer.step = step
        calls.is_removed = step in held
        write(str(path), step)
        n_held += bool(calls._held._writes)
        calls.end_step(wall_ns=1)
    calls.is_removed = False
    calls.settle()
    return n_held


@pytest.mark.filterwarnings("ignore:Exception ignored")  # plain open says as much of a file that nobody closes
@pytest.mark.parametrize("write", QUIET + LOOKING, ids=lambda write: write.__name__)
def test_a_file_that_was_held_back_ends_up_the_same(calls, tmp_path, write):
    watched, plain = tmp_path / "watched" / "file.bin", tmp_path / "plain" / "file.bin"
    watched.parent.mkdir()
    plain.parent.mkdir()
    held = {WINDOW_STEPS + n for n in (1, 2, 3, 6, 7, 8)}
    n_held = take_steps(calls, write, watched, WINDOW_STEPS + 8, held=held)
    assert calls.target == str(watched), calls.refused
    assert n_held == (len(held) if write in QUIET else 0), "held back until somebody looks"
    assert calls.is_comparable == (write in QUIET), "a file that is looked at in the same step proves nothing"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls._observer, "thread", None)  # as if nobody watched
        for step in range(1, WINDOW_STEPS + 9):
            write(str(plain), step)
    said = watched.read_bytes().replace(b"watched", b"plain")
    assert said == plain.read_bytes()
    assert not calls._held._guarded, "nothing of os is replaced any more"


@pytest.mark.parametrize(("write", "why"), [(replace_whole, "renamed"), (write_twice, "exactly once")])
def test_a_file_that_cannot_be_held_back_is_refused_by_name(calls, tmp_path, write, why):
    take_steps(calls, write, tmp_path / "file", 2 * WINDOW_STEPS)
    assert calls.target is None
    assert any(why in said for said in calls.refused.values())


def write_with_a_mark(path, step):
    Path(path).write_text(str(step), encoding="utf-16")


@pytest.mark.parametrize(
    ("write", "room_bytes", "why"), [(write_with_a_mark, 0, "encoding"), (rewrite_text, 1 << 62, "nearly full")]
)
def test_a_write_that_must_happen_in_its_step_is_not_held_back(calls, tmp_path, monkeypatch, write, room_bytes, why):
    monkeypatch.setattr(held_module, "MIN_ROOM_BYTES", room_bytes)
    path = tmp_path / "file"
    assert take_steps(calls, write, path, WINDOW_STEPS + 1, held={WINDOW_STEPS + 1}) == 0
    assert why in calls.refused[str(path)]
    assert not calls.is_comparable
    assert str(WINDOW_STEPS + 1).encode() in path.read_bytes().replace(b"\0", b"")


def test_what_is_held_back_is_serialised_at_once_and_off_the_clock(calls, tmp_path):
    path = str(tmp_path / "file")
    rewrite_json(path, 1)
    calls.target, calls.is_removed = path, True
    rewrite_json(path, 2)
    assert calls._observer.left_out_ns > 0
    with calls._open_real(path) as file:  # which nobody guards
        assert json.load(file)["step"] == 1
    assert json.loads((tmp_path / "file").read_text())["step"] == 2


class OnDevice:
    """What is ready once a device has computed it, 50 ms after it was asked to."""

    def __init__(self):
        self.ready_s = time.monotonic() + 0.05

    def wait(self):
        time.sleep(max(0.0, self.ready_s - time.monotonic()))

    def __reduce__(self):
        self.wait()
        return float, (1.0,)


def pickle_to(path, value):
    with open(path, "wb") as file:
        pickle.dump(value, file)


@pytest.mark.parametrize("write", [pickle_to, lambda path, value: torch.save(value, path)], ids=["pickle", "torch"])
def test_the_wait_for_the_device_stays_the_steps(calls, tmp_path, monkeypatch, write):
    """With the write left out, the step would still wait for what the device computes, if later."""
    path, value = str(tmp_path / "file"), OnDevice()
    write(path, value)
    calls.target, calls.is_removed, value = path, True, OnDevice()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", value.wait)
    write(path, value)
    assert calls._held._writes
    assert 0 < calls._observer.left_out_ns < 40e6


@pytest.mark.parametrize("obstacle", ["no room", "no folder"])
def test_a_save_of_which_no_copy_can_be_kept_happens_in_its_step(calls, tmp_path, monkeypatch, obstacle):
    path = str(tmp_path / "file")
    save_tensors(path, 1)
    calls.target, calls.is_removed = path, True
    save_tensors(path, 2)
    calls._observer.step += 1
    if obstacle == "no room":
        monkeypatch.setattr(files_module, "has_room", lambda folder: False, raising=False)
    else:
        monkeypatch.setattr(calls, "_folder", str(tmp_path / "gone"))
    save_tensors(path, 3)
    assert "no copy of it could be kept" in calls.refused[path]
    assert not calls.is_removed
    monkeypatch.setattr(calls._observer, "thread", None)
    assert torch.load(path)["weights"][0] == 3


def test_a_write_that_follows_another_of_its_step_is_not_held_back(calls, tmp_path):
    """After the last step nothing else ends the hold."""
    path = str(tmp_path / "file")
    append_line(path, 1)
    calls.target, calls.is_removed = path, True
    append_line(path, 2)
    with calls._open_real(path) as file:
        assert file.read() == "1,ß\n"
    append_line(path, 3)
    with calls._open_real(path) as file:
        assert file.read() == "1,ß\n2,ß\n3,ß\n"
    assert not calls.is_removed
    assert calls._observer.is_disturbed


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"])
def test_a_signal_ends_a_process_with_all_that_it_wrote(tmp_path, name):
    """In a process of its own: the signal has to find it while a write is held back."""
    first = f"resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); signal.signal(signal.{name}, signal.SIG_DFL)"
    done = hold_a_write(tmp_path / "file", f"signal.raise_signal(signal.{name})", first)
    assert done.returncode == -signal.Signals[name]
    assert (tmp_path / "file").read_text() == "old new"


def test_a_signal_that_has_a_handler_keeps_it(tmp_path):
    """That of faulthandler is in C, and ``signal.getsignal`` knows nothing of it."""
    first = "import faulthandler; faulthandler.register(signal.SIGUSR1); signal.signal(signal.SIGHUP, print)"
    done = hold_a_write(
        tmp_path / "file",
        "signal.raise_signal(signal.SIGUSR1); held.release(); signal.raise_signal(signal.SIGUSR1); "
        "signal.raise_signal(signal.SIGHUP)",
        first,
    )
    assert done.returncode == 0
    assert done.stderr.count("most recent call first") == 2
    assert "<frame" in done.stdout


def hold_a_write(path, then, first=""):
    script = f"""
import resource, signal, sys
from fulltilt.attach.inside.held import Held
{first}
held = Held(lambda: None, lambda function: function())
open(sys.argv[1], "w").write("old ")
assert held.begin(sys.argv[1]) is None
held.keep(sys.argv[1], "a", b"new")
{then}
"""
    words = [sys.executable, "-W", "ignore", "-c", script, str(path)]
    return subprocess.run(words, capture_output=True, text=True)


def test_time_of_a_write_is_booked_to_the_users_line(calls, tmp_path):
    rewrite_json(str(tmp_path / "file"), 3)
    calls.sites.end_step(counts=True)
    does = {site["does"]: site for site in calls.sites.list()}
    assert {"open", "json.dump", "close"} <= set(does)
    assert does["json.dump"]["line"] == rewrite_json.__code__.co_firstlineno + 3
    assert calls._observer.spans.totals_ns[FILE_WRITE] >= sum(site["ns"] for site in does.values()) > 0


def slow_part(values):
    total = 0.0
    for value in values:
        total += value * value
    return total


def quick_part(values):
    return max(values)


def test_tracing_finds_the_function_and_line_that_take_the_time():
    times, before = LineTimes(), sys.gettrace()
    times.start()
    sys.settrace(times.trace)
    try:
        for _ in range(20):
            slow_part(range(2000))
            quick_part(range(10))
    finally:
        sys.settrace(before)
        times.stop()
    by_function = Counter()
    for key, (ns, _) in times.lines.items():
        by_function[key and key[0].co_name] += ns
    assert by_function["slow_part"] > 10 * by_function["quick_part"]
