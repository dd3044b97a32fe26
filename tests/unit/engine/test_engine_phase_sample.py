"""Training tells the phases of one step a logging interval, and each interval those of its own last step."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values
from fulltilt.engine.loop.train import train
from fulltilt.engine.step import phase_sample
from fulltilt.engine.step.phase_sample import PhaseSample
from fulltilt.measure import FakeClock
from fulltilt.records import PHASES, StepsDone
from fulltilt.tasks import Workload

SLOW_STEPS = (4, 14)  # counted from 1; in a forward pass
SLOW_MS, STEP_MS = 50.0, 2.0


class SlowAt(nn.Linear):
    """Every forward pass takes its time on the clock, that of some steps more."""

    n_calls = 0

    def __init__(self, clock):
        super().__init__(3, 2)
        self.clock = clock

    def forward(self, x):
        self.n_calls += 1
        self.clock.advance(SLOW_MS if self.n_calls in SLOW_STEPS else STEP_MS)
        return super().forward(x)


class Told:
    def __init__(self):
        self.events: list[StepsDone] = []

    def __call__(self, event):
        if isinstance(event, StepsDone):
            self.events.append(event)


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(phase_sample, "HostClock", lambda: clock)
    return clock


@pytest.fixture
def told(tmp_path, clock):
    """Two epochs of 9 steps, logged every 4: intervals end at 4, 8, 9 (the epoch), 12, 16, 18."""
    workload = Workload(
        model=lambda: SlowAt(clock),
        dataset=lambda: TensorDataset(torch.randn(36, 3), torch.randint(2, (36,))),
        loss=functional.cross_entropy,
    )
    run = {"epochs": 2, "device": "cpu", "log_every_n_steps": 4, "checkpoint_every": None}
    config = config_from_values({"data": {"batch_size": 4}, "run": run}, base_dir=".")
    told = Told()
    train(config, out_dir=tmp_path, listeners=[told], workload=workload)
    return {event.step: event.phases_ms for event in told.events}


def test_each_interval_has_the_phases_of_its_last_step(told):
    assert list(told) == [4, 8, 9, 12, 16, 18]
    assert told[9] == told[18] == {}, "an interval that the epoch cuts short has no timed step"
    forward_ms = [told[step]["forward"] for step in (4, 8, 12, 16)]
    assert forward_ms == [SLOW_MS, STEP_MS, STEP_MS, STEP_MS], "step 14 is not the last of any"


def test_phases_make_up_the_step(told):
    for step in (4, 8, 12, 16):
        phases = told[step]
        assert set(phases) == {*PHASES, "step"}
        assert phases["h2d"] is None
        assert sum(phases[name] or 0.0 for name in PHASES) == pytest.approx(phases["step"])


def test_a_timed_step_that_was_left_spoils_nothing(clock):
    sample = PhaseSample(torch.device("cpu"), log_every=2)
    timer = sample.start_step(1)
    timer.lap("data_wait")
    clock.advance(20)  # the epoch ended: the step never came
    timer = sample.start_step(1)
    clock.advance(3)
    timer.lap("forward")
    sample.end_step(4)
    phases = sample.take_ms()
    assert phases["data_wait"] is None
    assert phases["step"] == 3
    assert sample.take_ms() == {}
