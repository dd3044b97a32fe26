"""Signals to data workers: held back while the process that started them lives, and no way to outlive it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from leftovers import find_processes, mark_processes
from torch.utils.data import Dataset, IterableDataset, _utils
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fulltilt.data import build_loader
from fulltilt.data.loading import worker_signals

PATIENCE_S = 60


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.zeros(2), index


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(2), index) for index in range(8)])


class Hangs(Numbers):
    """From its third sample on."""

    def __init__(self):
        self.is_hanging = torch.zeros((), dtype=torch.bool).share_memory_()

    def __getitem__(self, index):
        if index > 1:
            self.is_hanging.fill_(True)
            time.sleep(3600)
        return super().__getitem__(index)


def start_hanging():
    dataset = Hangs()
    batches = iter(build(dataset))
    next(batches)
    while not dataset.is_hanging:
        time.sleep(0.01)
    return batches


class KillsParent(Numbers):
    """And has a sample ready to send, when nobody is there to take it."""

    def __getitem__(self, index):
        if index > 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(0.3)
        return super().__getitem__(index)


class EndsProgram(Numbers):
    """As a reader that decodes with a program does."""

    def __getitem__(self, index):
        program = subprocess.Popen(["sleep", "3600"])
        program.terminate()
        return torch.zeros(2), program.wait(PATIENCE_S)


class SlowToSend(Numbers):
    def __getitem__(self, index):
        return torch.zeros(2), [SpentInsideTorch()]


class SpentInsideTorch:
    def __reduce__(self):  # called by the thread that sends batches
        numbers, end_s = torch.zeros(512, 512), time.monotonic() + 0.5
        while time.monotonic() < end_s:
            numbers @ numbers
        return int, ()


class Exits(Numbers):
    def __getitem__(self, index):
        sys.exit(7)


def take_as_it_is(samples):
    return samples


def build(dataset, *, collate=None, **options):
    options = {"num_workers": 1, "prefetch_factor": 1, **options}
    return build_loader(dataset, batch_size=2, shuffle=False, drop_last=False, collate=collate, options=options)


@pytest.mark.parametrize(
    ("context", "dataset", "persistent"),
    [
        ("fork", Numbers, False),
        ("spawn", Stream, False),
        ("forkserver", Numbers, True),
        # With those above, any two of the three in every pair of values.
        pytest.param("fork", Stream, True, marks=pytest.mark.slow),
        pytest.param("spawn", Numbers, True, marks=pytest.mark.slow),
        pytest.param("forkserver", Stream, False, marks=pytest.mark.slow),
    ],
)
def test_sigterm_is_held_back_from_a_workers_first_moment_on(context, dataset, persistent):
    """One that is spawned loads torch for seconds before it can say what it wants to do with a signal."""
    loader = build(dataset(), multiprocessing_context=context, persistent_workers=persistent)
    for _ in range(1 + persistent):  # they are used again
        batches, found = iter(loader), []
        workers = batches._workers
        for number in range(4):
            os.kill(workers[0].pid, signal.SIGTERM)
            found += next(batches)[1].tolist()
            assert len(found) == 2 * (number + 1)
        assert found == list(range(8))
    batches._shutdown_workers()
    # torch gives one that ends five seconds, which a busy machine may need, and is then made to use SIGKILL.
    assert {worker.exitcode for worker in workers} <= {0, -signal.SIGKILL}
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_worker_that_hangs_is_ended_with_its_loader(monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    batches = start_hanging()
    (worker,) = batches._workers
    batches._shutdown_workers()
    worker.join(PATIENCE_S)
    assert worker.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_a_spawned_worker_ends_cleanly_while_the_thread_that_sends_its_batches_is_inside_torch(monkeypatch):
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 60.0)  # torch kills what takes longer to end
    batches = iter(build(SlowToSend(), collate=take_as_it_is, prefetch_factor=2, multiprocessing_context="spawn"))
    next(batches)
    (worker,) = batches._workers
    batches._shutdown_workers()
    assert worker.exitcode == 0


def test_a_spawned_worker_keeps_its_exit_code():
    batches = iter(build(Exits(), multiprocessing_context="spawn"))
    (worker,) = batches._workers
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        next(batches)
    assert worker.exitcode == 7


def test_programs_that_a_dataset_starts_are_ended_by_sigterm():
    assert next(iter(build(EndsProgram())))[1].tolist() == [-signal.SIGTERM] * 2


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_worker_that_was_killed_with_torchs_lock_does_not_stop_the_end(monkeypatch):
    """it polls under a lock whether there is more to do; the main process waited for that lock for good"""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
    batches = iter(build(Numbers()))
    next(batches)
    lock, (worker,) = batches._workers_done_event._event._cond, batches._workers
    if not os.fork():
        lock.acquire()
        os._exit(0)
    os.wait()
    batches._shutdown_workers()
    worker.join(PATIENCE_S)
    assert worker.exitcode == -signal.SIGKILL, "it waited for the lock too"


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_where_a_worker_is_killed_as_it_starts_the_others_end_too(monkeypatch):
    """SIGTERM, by which Python ends them at its exit, is held back; and Python waits for them there"""
    started = []

    def fail(iterator, loader, first_iter):
        started.extend(iterator._workers)
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed. ")

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_reset", fail)
    with pytest.raises(RuntimeError, match="is killed by signal"):
        iter(build(Numbers(), num_workers=2))
    assert [worker.exitcode for worker in started] == [-signal.SIGKILL] * 2


HANGING = """
import sys
sys.path.insert(0, sys.argv[1])
from test_faults_worker_signals import start_hanging
batches = start_hanging()
print(flush=True)
"""


def start(monkeypatch, last):
    mark = mark_processes(monkeypatch)
    command = [sys.executable, "-c", HANGING + last, str(Path(__file__).parent)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    process.stdout.readline()
    return process, mark


def test_a_program_that_ends_while_its_worker_hangs_says_nothing_and_leaves_nothing(monkeypatch):
    process, mark = start(monkeypatch, "")
    assert process.communicate(timeout=PATIENCE_S) == ("", "")
    assert process.returncode == 0
    assert not find_processes(mark)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_its_parent(monkeypatch):
    """torch's worker looks for its parent between batches only"""
    process, mark = start(monkeypatch, "import time; time.sleep(3600)")
    try:
        process.kill()
        assert process.communicate(timeout=PATIENCE_S) == ("", "")  # when nobody has the pipes open any more
        assert not find_processes(mark)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_workers_whose_parent_was_killed_say_nothing(monkeypatch):
    """The thread that hands batches over wrote a traceback: ConnectionResetError."""
    mark = mark_processes(monkeypatch)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from test_faults_worker_signals import *; "
    code += "list(build(KillsParent(), num_workers=2))"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, "")  # read to its end: all that held it are gone
    assert not find_processes(mark)


def test_a_worker_tells_of_a_lost_connection_after_its_parents_end_would_have_killed_it(monkeypatch):
    done = []
    monkeypatch.setattr(worker_signals.time, "sleep", done.append)
    for error in (ConnectionResetError("by peer"), ValueError("no")):
        worker_signals._tell_unless_killed(lambda *told: done.append(told), type(error), error, None)
    waited_s, *told = done
    assert waited_s > worker_signals.PARENT_POLL_S
    assert [kind for kind, *_ in told] == [ConnectionResetError, ValueError]


SLOW_TO_END = """
import sys, threading, time
from multiprocessing import resource_tracker
from multiprocessing.queues import Queue
sys.path.insert(0, sys.argv[1])
from test_faults_worker_signals import Numbers, build

feed, forget, has_unlinked = Queue._feed, resource_tracker.unregister, threading.Event()
def feed_and_linger(*what):
    feed(*what)
    time.sleep(0.3)  # as long as a thread of a busy machine may wait for its turn
def forget_slowly(*what):
    if threading.current_thread() is not threading.main_thread():
        has_unlinked.set()
        time.sleep(0.3)
    forget(*what)
Queue._feed, resource_tracker.unregister = staticmethod(feed_and_linger), forget_slowly

batches = iter(build(Numbers(), multiprocessing_context="forkserver"))
next(batches)
del batches
has_unlinked.wait(1)
"""


def test_a_program_that_ends_with_its_loader_waits_for_the_threads_that_give_semaphores_back():
    """one that Python's exit freezes has unlinked its semaphore and not said so, and a leak is warned of"""
    command = [sys.executable, "-c", SLOW_TO_END, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
