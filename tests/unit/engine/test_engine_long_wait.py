"""A run whose data worker stands still says so, and which one, while it waits."""

import gc
import os
import re
import signal
import types
import weakref

import pytest
import torch
from torch.utils.data import get_worker_info
from training_cases import Points, Recorder, build_config, build_workload, run_train

from fulltilt.data import build_loader
from fulltilt.data.loading import worker_signals
from fulltilt.engine.announce import Announcer
from fulltilt.engine.loop.opening import watch_loaders
from fulltilt.records import Noted


class StopsOnce(Points):
    """Its second worker stops itself at the sample ``at``, as ``kill -STOP`` does; once, whoever goes on."""

    def __init__(self, at):
        super().__init__()
        self.at, self.has_stopped = at, torch.zeros((), dtype=torch.bool).share_memory_()

    def __getitem__(self, index):
        worker = get_worker_info()
        if worker is not None and worker.id == 1 and index >= self.at and not self.has_stopped:
            self.has_stopped.fill_(True)
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)


class GoesOn(Recorder):
    """Lets the worker that is named as stopped go on, as a user would."""

    def __call__(self, event):
        super().__call__(event)
        if isinstance(event, Noted) and (named := re.search(r"kill -CONT (\d+)", event.message)):
            os.kill(int(named[1]), signal.SIGCONT)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(worker_signals, "POLL_S", 0.25)
    monkeypatch.setattr(worker_signals, "LONG_WAIT_S", 0.75)


@pytest.mark.parametrize(("split", "persistent"), [("training", False), ("training", True), ("validation", False)])
def test_a_data_worker_that_stands_still_is_named_and_the_run_goes_on_with_it(tmp_path, split, persistent):
    parts = {"training": "dataset", "validation": "validation"}
    workload = build_workload(**{parts[split]: lambda: StopsOnce(at=20)})
    config = build_config(data__num_workers=2, data__persistent_workers=persistent)
    result, recorder = run_train(tmp_path, config, GoesOn(), workload=workload)
    assert result.epoch == 2
    # A machine that is busy enough takes its time to start workers, and then says so as well.
    told = [event.message for event in recorder.of(Noted) if "is stopped by a signal" in event.message]
    assert len(told) == 1
    assert told[0].startswith(f"no {split} batch came for 1 s, and batches come in order: data worker 1 of 2 (pid ")
    assert "; the next one is due from data worker 2; with data.num_workers 0 " in told[0]
    assert re.search(
        r"data worker 2 of 2 \(pid (\d+)\) is stopped by a signal \(kill -CONT \1 lets it go on\)", told[0]
    )


def test_each_long_wait_is_told_once_and_short_ones_do_not_add_up(monkeypatch):
    script = [False, False, True, False, False, True, False, False, False, False, True, False, False, False]
    monkeypatch.setattr(
        worker_signals._MultiProcessingDataLoaderIter, "_try_get_data", lambda self, timeout: (script.pop(0), None)
    )
    monkeypatch.setattr(worker_signals._Iterator, "__del__", lambda self: None, raising=False)  # it has no workers
    told = []
    iterator = object.__new__(worker_signals._Iterator)
    iterator.__dict__ |= {
        "_waited_s": 0.0,
        "_workers": [],
        "_task_info": {3: (1,), 4: (0, "a batch")},
        "_rcvd_idx": 3,
        "_on_long_wait": lambda seconds, pids, due_from: told.append((len(script), due_from)),
    }
    while script:
        iterator._try_get_data()
    assert told == [(5, 1), (0, 1)], "at the third look of each wait of three or more"


class Session(types.SimpleNamespace):
    """As much of a session as its loaders are given; a weak reference may be made to it."""


def watch_session():
    loader = build_loader(Points(), batch_size=4, shuffle=False, drop_last=False)
    session = Session(run=types.SimpleNamespace(loader=loader), validation=None, announce=Announcer(()))
    watch_loaders(session)
    return session, loader


def test_a_loader_does_not_keep_the_session_that_it_tells():
    """A run that goes on with smaller batches built its new model beside the old one, which the loader still held."""
    session, loader = watch_session()
    kept = weakref.ref(session)
    assert loader.on_long_wait is not None
    gc.disable()
    try:
        del session
        assert kept() is None
    finally:
        gc.enable()


def test_a_rank_without_listeners_says_it_where_its_last_words_are_read(capfd):
    session, loader = watch_session()
    loader.on_long_wait(20.0, [os.getpid()], None)
    said = capfd.readouterr().err
    assert said.startswith(
        f"no training batch came for 20 s, and batches come in order: data worker 1 of 1 (pid {os.getpid()}"
    )
    assert session.announce.notes == [said.strip()]
