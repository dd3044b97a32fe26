"""Real trials of workloads that go wrong: torch, the engine, data workers and limits are all what users get."""

import os
import signal
import subprocess
import time

import pytest
from tests.faults.leftovers import count_descriptors, watch_zygote

from fulltilt.hardware import proctree
from fulltilt.levers import default_plan
from fulltilt.records import TrialRequest
from fulltilt.tuner.question.source import resolve_target
from fulltilt.tuner.trials.live import open_arms
from fulltilt.tuner.trials.target import ProcessTarget

WORKERS, LIMITED, HANGS = {"workers": 1}, {"limit_bytes": 768 * 2**20}, {"deadline_s": 1.5}

CASES = [
    ("fine", "ok", "", {}),
    ("fine", "ok", "", WORKERS),
    ("print_and_go_on", "ok", "", {}),
    ("leave_family", "ok", "", {}),
    ("leave_names", "ok", "", {}),
    ("write_to_pipe", "ok", "", {}),
    ("raise_later", "error", "ValueError: planted in forward", {}),
    ("raise_later", "error", "ValueError: planted in forward", WORKERS),
    ("raise_in_loss", "error", "planted in the loss", {}),
    ("raise_in_model", "error", "planted in the model", {}),
    ("raise_in_dataset", "error", "planted in the dataset", {}),
    ("raise_in_optimizer", "error", "planted in the optimizer", {}),
    ("raise_in_worker", "error", "of WorkerEnds cannot be read: ValueError: planted in a worker", {}),
    ("raise_in_worker", "error", "of WorkerEnds cannot be read: ValueError: planted in a worker", WORKERS),
    ("say_nan", "error", "the loss is nan", {}),
    ("exit_clean", "error", "SystemExit: 0", {}),
    ("interrupt", "error", "KeyboardInterrupt", {}),
    ("say_cuda_memory", "out_of_memory", "CUDA out of memory", {}),
    ("worker_says_memory", "out_of_memory", "no room for sample 40", {}),
    ("worker_says_memory", "out_of_memory", "MemoryError", WORKERS),
    ("allocate_too_much", "out_of_memory", "allocate", {}),
    ("fill_memory", "out_of_memory", "", LIMITED),
    ("fill_memory", "out_of_memory", "", LIMITED | WORKERS),
    ("fill_memory_in_python", "out_of_memory", "", LIMITED),
    ("fill_memory_in_worker", "out_of_memory", "", LIMITED | WORKERS),
    ("fill_own_limit", "out_of_memory", "allocate", {}),
    ("kill", "error", "SIGKILL", WORKERS),
    ("segfault", "error", "SIGSEGV", {}),
    ("bus_error", "error", "SIGBUS", {}),
    ("kill_worker", "error", ") died: killed by SIGKILL", WORKERS),
    ("segfault_worker", "error", "killed by SIGSEGV", WORKERS),
    ("bus_error_worker", "error", "killed by SIGBUS", WORKERS),
    ("exit_worker", "error", "exit code 7", WORKERS),
    ("kill_inner_worker", "error", "", {}),  # torch says it in one of several ways
    ("hang_in_step", "timeout", "deadline", HANGS),
    ("hang_ignoring", "timeout", "deadline", HANGS | WORKERS),
    ("hang_worker", "timeout", "deadline", HANGS | WORKERS),
    ("hang_in_model", "timeout", "deadline", HANGS),
    ("stop_itself", "timeout", "deadline", HANGS),
    ("hang_with_family", "timeout", "deadline", HANGS),
]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trials")
    # What was compiled is kept between trials, on purpose.
    with watch_zygote(folder, TORCHINDUCTOR_CACHE_DIR=str(folder / "compiled")) as watched:
        yield watched


def run(zygote, folder, name, *, workers=0, deadline_s=120.0, limit_bytes=None):
    usual = TrialRequest(
        source=resolve_target(f"faulty_workloads:{name}").source, device="cpu", n_steps=1, deadline_s=deadline_s,
        memory_limit_bytes=limit_bytes, max_measure_s=0.1,
    )  # fmt: skip
    target = ProcessTarget(usual, folder, zygote=zygote)
    return target(default_plan({"batch_size": 16, "num_workers": workers}), id="t1", why="")


@pytest.mark.parametrize(("name", "status", "words", "how"), CASES, ids=[f"{c[0]}-{'-'.join(c[3])}" for c in CASES])
def test_a_real_trial_gets_its_status_and_leaves_nothing(watched, tmp_path, name, status, words, how):
    zygote, find_leftovers = watched
    zygote.start()
    n_open = count_descriptors(os.getpid())
    trial = run(zygote, tmp_path, name, **how)
    assert (trial.status, words in (trial.reason or "")) == (status, True), trial.reason
    assert find_leftovers() == []
    assert count_descriptors(os.getpid()) <= n_open


def test_data_workers_that_are_stopped_end_with_the_server_though_nobody_ends_them(watched, tmp_path):
    zygote, find_leftovers = watched
    source, plan = resolve_target("faulty_workloads:fine").source, default_plan({"batch_size": 16, "num_workers": 2})
    request = TrialRequest(id="t1", source=source, plan=plan, device="cpu")
    with open_arms(lambda request: zygote, {"t1": request}, tmp_path):
        family = proctree.find_descendants(zygote.pid)
        assert len(family) == 3
        os.kill(zygote.pid, signal.SIGKILL)
        end_s = time.monotonic() + 60
        while {entry.state for pid in family if (entry := proctree.read_process(pid))} - {"Z"}:
            assert time.monotonic() < end_s
            time.sleep(0.01)
    assert find_leftovers() == []


def can_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs leave to mount a /dev/shm of its own")
def test_a_full_dev_shm_is_out_of_memory(watched, tmp_path):
    zygote, find_leftovers = watched
    trial = run(zygote, tmp_path, "fill_shared_memory", workers=2)
    assert trial.status == "out_of_memory", trial.reason
    assert find_leftovers() == []
