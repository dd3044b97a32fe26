"""Real child processes that fail in every way we know of: each is a row with a reason, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.errors import NoPlanError, StorageError, TrainingError, UsageError
from fulltilt.levers import Facts, default_plan
from fulltilt.records import TrialRequest, WorkloadSource, classify_outcome
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.session import Session
from fulltilt.tuner.search.strategies import exhaustive
from fulltilt.tuner.trials import client as zygote_client
from fulltilt.tuner.trials import process
from fulltilt.tuner.trials.process import Zygote, run_trial_process
from fulltilt.tuner.trials.rows import build_trial
from fulltilt.tuner.trials.target import ProcessTarget

HERE = Path(__file__).parent
BODIES = (str(HERE), str(HERE.parent / "chaos"))  # where the bodies of trials lie
GIB = 2**30
IMPORTS = f"import sys; sys.path += [{str(HERE)!r}, {str(HERE.parents[1])!r}]\n"  # of code that imports this file
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    path = tmp_path_factory.mktemp("zygote") / "zygote.log"
    with Zygote(path, body="trial_bodies:do", preload=("numpy", "torch", "torch.utils.data")) as started:
        started.start()
        yield started


@pytest.fixture
def light_zygote(tmp_path):
    """Without torch, for tests that have it start again and again."""
    with Zygote(tmp_path / "light.log", body="trial_bodies:do", preload=("json",)) as started:
        yield started


@pytest.fixture
def run(zygote, tmp_path):
    return _build_runner(zygote, tmp_path)


@pytest.fixture
def run_light(light_zygote, tmp_path):
    return _build_runner(light_zygote, tmp_path)


def _build_runner(zygote, tmp_path):
    """Build what runs one act in a trial process and returns its outcome."""

    def run_act(act: str, *, deadline_s=300.0, memory_limit_bytes=None, log_path=tmp_path / "t1.log", **details):
        request = TrialRequest(
            id="t1", source=build_source(act=act, **details), plan=default_plan({"batch_size": 8}), device="cpu",
            n_steps=4, deadline_s=deadline_s, memory_limit_bytes=memory_limit_bytes,
        )  # fmt: skip
        return run_trial_process(request, zygote=zygote, log_path=log_path)

    return run_act


def build_source(**config):
    return WorkloadSource(config=config, base_dir=".", import_paths=BODIES)


def judge(outcome):
    return classify_outcome(outcome.evidence)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def build_zygote_of(tmp_path, monkeypatch):
    """Build a zygote whose preload is a module of this code."""

    def build(code: str) -> Zygote:
        (tmp_path / "its_preload.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return Zygote(tmp_path / "zygote.log", body="trial_bodies:do", preload=("its_preload",))

    return build


def check_family_is_gone(note: Path) -> None:
    """What ``hang_with_company`` left: processes, a name in shared memory, a file and its folder."""
    pid, child, loner, file = note.read_text().split()
    wait_until(lambda: not any(is_alive(int(p)) for p in (pid, child, loner)))
    assert not Path(f"/dev/shm/torch_{pid}_12345_0").exists()
    assert not Path(file).parent.exists()


def is_written(note: Path) -> bool:
    """Whether ``hang_with_company`` has come to its hang."""
    return note.exists() and len(note.read_text().split()) == 4


def test_an_exception_is_the_reason_and_its_traceback_is_in_the_log_that_the_row_names(run):
    outcome = run("raise_error", type="MemoryError", message="no room\nsecond line")
    log = outcome.log_path.read_text()
    assert judge(outcome)[0] == "out_of_memory"
    assert "Traceback" in log
    assert "chaos_bodies.py" in log
    trial = build_trial(default_plan(), outcome, id="t1", why="")
    assert trial.reason == f"MemoryError: no room (log: {outcome.log_path})"
    assert judge(run("leave_at_once", code=3))[0] == "error", "words of an earlier attempt do not reach this one"


@pytest.mark.parametrize(
    ("act", "details", "status", "words"),
    [
        ("leave_at_once", {"code": 0}, "error", "no result"),
        *(("send", {"number": int(number)}, "error", number.name) for number in (signal.SIGABRT, signal.SIGTERM)),
        ("print_and_finish", {"words": "ERROR: something harmless, CUDA error: out of memory"}, "ok", ""),
    ],
)
def test_an_end_without_an_exception_says_how_and_printed_words_are_no_failure(run, act, details, status, words):
    outcome = run(act, **details)
    assert judge(outcome)[0] == status
    assert words in (judge(outcome)[1] or "")
    assert details.get("words", "") in outcome.log_path.read_text()


def test_silence_after_the_first_steps_is_a_timeout(run, monkeypatch):
    monkeypatch.setattr(process, "SILENCE_FLOOR_S", 0.5)
    status, reason = judge(run("stay_silent"))
    assert status == "timeout"
    assert "no step done for" in reason


def test_the_memory_watchdog_ends_a_trial_above_its_limit_alone_and_names_the_part(run):
    sizes = {"n_blocks": 20, "block_bytes": 64 * 2**20, "hold_s": 250}
    status, reason = judge(run("allocate", memory_limit_bytes=GIB, part="evaluation", **sizes))
    assert status == "out_of_memory"
    assert "limit is 1.00 GiB" in reason
    assert reason.endswith("in the part 'evaluation'")
    outcome = run("allocate", memory_limit_bytes=2 * GIB, n_blocks=2, block_bytes=64 * 2**20, pause_s=0.3)
    assert judge(outcome)[0] == "ok"


def test_tune_inside_a_trial_says_so(run):
    outcome = run("tune_inside")
    assert outcome.evidence.exception_type == UsageError.__name__
    assert "inside trial t1" in outcome.evidence.message


def test_a_zygote_that_dies_is_started_again_once_for_a_trial(run_light, tmp_path, light_zygote):
    light_zygote.start()
    before = light_zygote.pid
    outcome = run_light("kill_zygote", marker=str(tmp_path / "marker"))
    assert judge(outcome)[0] == "ok"
    assert light_zygote.pid != before
    status, reason = judge(run_light("kill_zygote"))
    assert status == "error"
    assert "SIGKILL, twice" in reason
    assert judge(run_light("finish"))[0] == "ok"


def test_no_folder_stays_of_a_zygote_that_was_killed_before_it_answered(build_zygote_of, tmp_path, monkeypatch):
    code = """
import os, pathlib, signal, tempfile

def die():
    home = pathlib.Path(tempfile.gettempdir())
    (home / "seen").open("a").write(f"{len(list(home.glob('fulltilt-*')))} ")
    os.kill(os.getpid(), signal.SIGKILL)

os.fork = die
"""
    with tempfile.TemporaryDirectory() as home:  # of a short name, or /tmp would be taken in its place
        monkeypatch.setenv("TMPDIR", home)
        with build_zygote_of(code) as started:
            outcome = _build_runner(started, tmp_path)("finish")
        assert "SIGKILL, twice" in judge(outcome)[1]
        assert (Path(home) / "seen").read_text() == "1 1 ", "it was there at the death, and gone at the next one's"
        assert list(Path(home).glob("fulltilt-*")) == []


def test_what_left_its_session_ends_though_the_zygote_was_killed(run_light, tmp_path):
    note = tmp_path / "note"
    run_light("kill_zygote_with_loner", note=str(note))
    pids = note.read_text().split()
    assert len(pids) == 4  # a zygote that dies is tried twice
    assert not any(is_alive(int(pid)) for pid in pids)


def test_a_zygote_that_was_stopped_costs_a_timeout_and_the_next_trial_runs(run_light, monkeypatch):
    monkeypatch.setattr(process, "EXIT_PATIENCE_S", 0.5)
    monkeypatch.setattr(zygote_client, "EXIT_PATIENCE_S", 0.5)
    assert judge(run_light("stop_zygote", deadline_s=0.5))[0] == "timeout"
    monkeypatch.undo()
    assert judge(run_light("finish"))[0] == "ok"


def test_a_folder_for_temporary_files_that_vanished_costs_a_new_zygote(light_zygote, tmp_path, monkeypatch):
    home = Path(tempfile.mkdtemp())
    monkeypatch.setenv("TMPDIR", str(home))
    run_light = _build_runner(light_zygote, tmp_path)
    assert judge(run_light("finish"))[0] == "ok"
    before = light_zygote.pid
    home.rmdir()
    assert judge(run_light("finish"))[0] == "ok"
    assert light_zygote.pid != before


def test_workers_hand_over_batches_though_the_folder_for_temporary_files_has_a_long_name(tmp_path, monkeypatch):
    """The name of their socket lies in it, and may have 107 characters."""
    home = tmp_path / ("long" * 10)
    home.mkdir()
    monkeypatch.setenv("TMPDIR", str(home))
    with Zygote(tmp_path / "z.log", body="trial_bodies:do", preload=("torch.utils.data",)) as started:
        outcome = _build_runner(started, tmp_path)("share_batches")
    assert outcome.reply["state"]["sum"] == 8.0, outcome.log_path.read_text()


@pytest.mark.skipif(not os.access(MEMORY_GROUPS, os.W_OK), reason="needs a memory control group of its own (v1, root)")
def test_a_trial_ended_by_the_kernel_for_memory_is_out_of_memory(tmp_path):
    """The whole search lies in a group with a limit, as in a container: the kernel takes its largest process."""
    group = MEMORY_GROUPS / f"fulltilt-test-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(192 * 2**20))
    code = f"""
import os
from pathlib import Path
Path({str(group / "cgroup.procs")!r}).write_text(str(os.getpid()))
import test_faults_trials as t
path = Path({str(tmp_path)!r})
with t.Zygote(path / "z.log", body="trial_bodies:do", preload=("json",)) as zygote:
    print(*t.classify_outcome(t._build_runner(zygote, path)("fill").evidence), sep=": ")
"""
    try:
        ended = subprocess.run([sys.executable, "-c", IMPORTS + code], capture_output=True, text=True)
    finally:
        group.rmdir()
    assert ended.stdout.strip() == "out_of_memory: killed by the kernel's out-of-memory killer", ended.stderr


def test_a_zygote_that_cannot_start_says_what_is_missing(tmp_path):
    with (
        Zygote(tmp_path / "zygote.log", preload=("no_such_module",)) as broken,
        pytest.raises(TrainingError, match="no_such_module"),
    ):
        broken.start()


def test_a_zygote_that_is_at_work_is_waited_for_beyond_the_limit_of_a_hang(build_zygote_of, monkeypatch):
    monkeypatch.setattr(zygote_client, "STILL_LIMIT_S", 1.5)
    monkeypatch.setattr(zygote_client, "START_LOOK_S", 0.05)
    work = "import time\nwhile time.process_time() < 3.0: pass\n"
    start_s = time.monotonic()
    with build_zygote_of(work) as zygote:
        zygote.start()
        assert time.monotonic() - start_s > 1.5
        assert is_alive(zygote.pid)


def test_a_zygote_that_hangs_is_told_from_a_slow_one(build_zygote_of, monkeypatch):
    monkeypatch.setattr(zygote_client, "STILL_LIMIT_S", 1.5)
    with (
        build_zygote_of("import signal; signal.pause()") as zygote,
        pytest.raises(TrainingError, match=r"no answer in .* and it hangs: nothing computed or read for .*zygote.log"),
    ):
        zygote.start()
    assert zygote.pid is None


def test_trials_and_facts_that_hang_end_with_the_budget_whatever_their_own_deadline(light_zygote, tmp_path):
    source, plan = build_source(act="hang"), default_plan({"batch_size": 16})
    usual = TrialRequest(source=source, device="cpu", deadline_s=3600)
    target = ProcessTarget(usual, tmp_path, zygote=light_zygote)
    light_zygote.start()
    target.end_s = time.monotonic() + 1.0
    assert target(plan, id="t1", why="").status == "timeout"
    assert time.monotonic() >= target.end_s
    target.end_s = time.monotonic() + 1.0
    with pytest.raises(NoPlanError, match="budget was gone before the first run: building the workload took") as ended:
        target.read_facts(plan)
    assert ended.value.remedy == "give a larger --budget"


def test_a_zygote_that_starts_slower_than_the_budget_is_not_waited_for(build_zygote_of, tmp_path):
    zygote = build_zygote_of("import time; time.sleep(3600)")
    target = ProcessTarget(TrialRequest(source=build_source(), device="cpu"), tmp_path, zygote=zygote)
    target.end_s = time.monotonic() + 0.5
    with pytest.raises(NoPlanError, match=r"budget was gone before the first run.*no answer in") as ended:
        target.read_facts(default_plan({"batch_size": 1}))
    assert ended.value.remedy == "give a larger --budget", "it was all of what the process had done"
    assert zygote.pid is None
    plan = default_plan({"batch_size": 1})
    row = target(plan, id="t1", why="")
    rows = target.run_group({"t2": plan, "t3": plan.replace(batch_size=2)}, why="")
    assert (row.status, [row.status for row in rows]) == ("timeout", ["timeout"])
    assert zygote.pid is None


def test_the_zygote_has_one_thread_and_no_device_context_and_its_trials_start_clean(tmp_path):
    with Zygote(tmp_path / "zygote.log", body="trial_bodies:do") as full:
        state = _build_runner(full, tmp_path)("tell_state").reply["state"]
        seen = psutil.Process(full.pid)
        assert seen.num_threads() == 1
        assert not [file.path for file in seen.open_files() if file.path.startswith("/dev/nvidia")]
    assert (state["missing"], state["has_cuda_context"]) == ([], False)
    assert (state["session"], state["trial"]) == (state["pid"], "t1")
    assert (state["sigterm_default"], state["sigint_ignored"], state["stdin_empty"]) == (True, False, True)
    assert state["tmpdir"] != tempfile.gettempdir()
    assert state["n_descriptors"] <= 6  # three standard ones, answers, and two of the listing itself


def test_the_zygote_ends_with_its_parent(tmp_path):
    note = tmp_path / "note"
    code = f"""
import test_faults_trials as t
path = t.Path({str(tmp_path)!r})
zygote = t.Zygote(path / "z.log", body="trial_bodies:do", preload=("json",))
t._build_runner(zygote, path)("hang_with_company", note={str(note)!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", IMPORTS + code])
    wait_until(lambda: is_written(note))
    family = [p.pid for p in psutil.Process(parent.pid).children(recursive=True)]
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, family)))
    check_family_is_gone(note)


def test_an_interrupt_ends_the_trial_and_its_family(run_light, tmp_path):
    note = tmp_path / "note"

    def interrupt():
        wait_until(lambda: is_written(note))
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        run_light("hang_with_company", note=str(note))
    helper.join()
    check_family_is_gone(note)


def test_a_log_that_cannot_be_written_is_a_storage_error(run, tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    with pytest.raises(StorageError):
        run("finish", log_path=tmp_path / "logs" / "t1.log")


def test_a_full_disk_stops_the_search_and_loses_no_row(tmp_path):
    """A real limit on the size of files, in a process of its own: the fourth row does not fit."""
    code = f"""
import resource
sys.dont_write_bytecode = True  # Python 3.11 keeps a file of its own that the limit cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
import test_faults_trials as t
t.run_small_search({str(tmp_path / "out")!r})
"""
    ended = subprocess.run([sys.executable, "-c", IMPORTS + code], capture_output=True, text=True)
    assert "StorageError" in ended.stderr
    whole = (tmp_path / "out" / "trials.jsonl").read_text()
    assert whole.endswith("\n")
    kept = [json.loads(line)["plan"]["batch_size"] for line in whole.splitlines()]
    assert 1 <= len(kept) < 6
    asked = run_small_search(str(tmp_path / "out"))
    assert kept + asked == [1, 2, 4, 8, 16, 32]


def run_small_search(path: str) -> list[int]:
    """Six batch sizes on a simulated target; returns those that were run now."""
    base = default_plan()
    axes, facts = {"batch_size": (1, 2, 4, 8, 16, 32)}, Facts(device_type="cpu")
    target = SimulatedTarget(lambda plan: Answer(samples_per_s=float(plan["batch_size"])))
    with RunFolder(path, fingerprint_parts={}, command="tune", results=["trials.jsonl"]) as folder:
        Session(target, Journal(folder)).run(exhaustive(Space(axes=axes, base=base, user_plan=base, facts=facts)))
    return [plan["batch_size"] for plan in target.asked]


def wait_until(condition, limit_s: float = 300.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
