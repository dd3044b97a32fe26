"""Events of a search, and a terminal, for the tests of what a person reads."""

import dataclasses
import io

from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import default_plan
from fulltilt.tuner import SearchStarted, TrialDone

STARTED = SearchStarted(
    strategy="model_first", grid_size=336, n_planned=30, n_resumed=0, device="cpu", folder="runs/tune/a",
    memory_room_gib=8.0, budget_s=180.0, is_budget_default=True,
)  # fmt: skip


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


def make_trial(id="t3", plan=None, *, kind="end_to_end", why="predicted the fastest", **answer):
    given = Answer(**({"samples_per_s": 1234.0, "memory_gib": 0.5} | answer))
    row = SimulatedTarget(lambda _: given)(default_plan(plan or {"batch_size": 64}), id=id, why=why)
    return dataclasses.replace(row, kind=kind)


def done(trial, **changes):
    return TrialDone(**({"trial": trial, "n_done": 3, "n_planned": 12, "seconds_left": 61.0} | changes))
