"""TensorBoardLog: TensorBoard's own reader finds the curves."""

import pytest
from listener_events import ENDED, evaluated, started, steps_done, tell

from fulltilt.listeners import TensorBoardLog


def read_scalars(path, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    events = accumulator(str(path))
    events.Reload()
    return [(e.step, round(e.value, 4)) for e in events.Scalars(tag)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_curves_are_read_back_and_repeated_steps_are_hidden(tmp_path):
    log = TensorBoardLog(tmp_path)
    steps = [steps_done(1, 0.5, phases_ms={"forward": 2.0, "h2d": None}), steps_done(2, 0.4), steps_done(3, 9.0)]
    tell(log, started(), *steps, evaluated(step=3), ENDED, started(first_step=2), steps_done(3, 0.3), ENDED)
    assert read_scalars(log.path, "train/loss") == [(1, 0.5), (2, 0.4), (3, 0.3)]
    assert read_scalars(log.path, "phases_ms/forward")[0] == (1, 2.0)
