"""TensorBoardLog: TensorBoard's own reader finds the curves."""

import sys

import pytest

from fulltilt.errors import UsageError
from fulltilt.listeners import TensorBoardLog
from fulltilt.records import Evaluated, RunEnded, RunStarted, StepsDone


def started(first_step=0):
    return RunStarted(
        name="digits",
        out_dir="runs/x",
        device="cpu",
        plan={},
        n_parameters=1,
        n_samples=1,
        steps_per_epoch=10,
        n_epochs=1,
        first_step=first_step,
    )


def steps_done(step, loss):
    return StepsDone(
        epoch=0,
        step=step,
        step_in_epoch=step,
        n_steps=1,
        n_samples=1,
        seconds=1.0,
        loss=loss,
        lr=0.1,
        samples_per_s=1.0,
        phases_ms={"forward": 2.0, "h2d": None},
    )


ENDED = RunEnded(reason="finished", step=3, seconds=1.0, metrics={})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def read_scalars(path, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = accumulator(str(path))
    events.Reload()
    return [(e.step, round(e.value, 4)) for e in events.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_curves_are_read_back_and_repeated_steps_are_hidden(tmp_path):
    log = TensorBoardLog(tmp_path)
    evaluated = Evaluated(epoch=0, step=3, split="val", metrics={"accuracy": 0.75}, seconds=1.0, training_seconds=1.0)
    for event in (started(), steps_done(1, 0.5), steps_done(2, 0.4), steps_done(3, 9.0), evaluated, ENDED):
        log(event)
    log(started(first_step=2))
    for event in (steps_done(3, 0.3), ENDED):
        log(event)
    assert read_scalars(log.path, "train/loss") == [(1, 0.5), (2, 0.4), (3, 0.3)]
    assert read_scalars(log.path, "phases_ms/forward")[0] == (1, 2.0)


def test_a_missing_package_is_named_with_its_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'fulltilt\[track\]'"):
        TensorBoardLog(tmp_path)
