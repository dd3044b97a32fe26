"""Start attempts on machines: one file an engine, all behind ``Executor``.

An executor knows machines and processes, and no experiment: what is to be done the runner asks the server.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import Order

Seen = Literal["waiting", "alive", "gone", "unknown"]
"""``waiting``: the engine has not begun it. ``gone``: the engine says that it is not there. ``unknown``: the engine
cannot be asked, which says nothing."""


class RefusedError(Exception):
    """The engine did not take an order, or no process can be started."""


class AwayError(RefusedError):
    """Nobody answers for the engine, which says nothing about the order or the machine."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A machine of an engine, and all its devices by name.

    Attributes:
        n_threads: Of each device that is a share of the CPU.
        n_used: Devices in use, by whomever, where the engine has others to serve.
        busy: Devices that others compute on, or that do not answer, with what shows it; ours may be among them.
        is_away: It takes nothing now, and may again.
        says_itself: Which devices others use its machine tells the server; until it has, it takes nothing.
    """

    node: str
    devices: Sequence[str]
    n_threads: int | None = None
    n_used: int = 0
    busy: Mapping[str, str] = dataclasses.field(default_factory=dict)
    is_away: bool = False
    says_itself: bool = False


class Executor(Protocol):
    """What the coordinator asks of an engine."""

    name: str
    is_lasting: bool
    """Attempts go on when the server is gone."""

    def read_places(self) -> Sequence[Place]:
        """Return the machines there are."""
        ...

    def submit(self, attempt: Attempt, order: Order, node: str, devices: Sequence[str]) -> str:
        """Start the attempt's guard and return what the engine calls it. The same attempt twice starts one.

        Raises:
            RefusedError: it was not started. AwayError: it is not known to be started.
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


def name_job(mark: str) -> str:
    """Return the name of an attempt's job, by which an engine finds it."""
    return f"fulltilt-{mark.replace('/', '-')}"
