"""Start attempts on machines: one file an engine, all behind ``Executor``.

An executor knows machines and processes, and no experiment: what is to be done the runner asks the server.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import Order

Seen = Literal["alive", "gone", "unknown"]
"""``gone``: the engine says that it is not there. ``unknown``: the engine cannot be asked, which says nothing."""


class RefusedError(Exception):
    """The engine did not take an order: no process can be started, the engine is away."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A machine that an engine offers, and all its devices by name."""

    node: str
    devices: Sequence[str]
    n_threads: int | None = None  # of each device that is a share of the CPU


class Executor(Protocol):
    """What the coordinator asks of an engine."""

    name: str
    is_lasting: bool
    """Attempts go on when the server is gone."""

    def read_places(self) -> Sequence[Place]:
        """Return the machines that take attempts now."""
        ...

    def submit(self, attempt: Attempt, order: Order, node: str, devices: Sequence[str]) -> str:
        """Start the attempt's guard and return what the engine calls it. The same attempt twice starts one.

        Raises:
            RefusedError: it was not started.
        """
        ...

    def poll(self, experiments: Sequence[Experiment]) -> Mapping[str, Seen]:
        """Look for the newest attempts of experiments: id → what was seen."""
        ...

    def cancel(self, experiment: Experiment, *, is_urgent: bool) -> None:
        """Ask the attempt to save and end, or end it with all it started."""
        ...

    def close(self) -> None: ...


def name_mark(experiment: Experiment) -> str:
    """Return the mark of an experiment's newest attempt; no other attempt of any lab has it."""
    return f"{experiment.id}/{experiment.attempt}/{(experiment.fence or '')[:16]}"
