"""Events of a search while it runs, for the live table of the command line."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fulltilt.records import Plan, Trial


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchStarted:
    strategy: str
    grid_size: int  # plans that can run
    n_planned: int  # trials, at most unless the machine is noisy; an adaptive search usually needs fewer
    n_resumed: int  # rows found in the run folder
    device: str
    folder: str
    user_plan: Plan | None = None
    memory_room_gib: float | None = None  # what a recommended plan may use; None when no limit is known
    budget_s: float | None = None  # that it takes at most; None: until all of the grid has run
    is_budget_default: bool = False  # nobody asked for it
    levers_left_out: tuple[str, ...] = ()  # that --named-only leaves out
    full_grid_size: int = 0  # plans of the grid with them


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchNoted:
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialStarted:
    id: str
    plan: Plan
    why: str
    n_done: int
    n_planned: int
    kind: str = "end_to_end"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgressed:
    """A sign of life of the running trial, as it was sent."""

    id: str
    values: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialDone:
    trial: Trial
    n_done: int
    n_planned: int
    seconds_left: float | None  # at most, if trials take what their like took; None before there is one
    is_resumed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TurnsDone:
    """A group of plans took turns, or one of them failed."""

    rows: tuple[Trial, ...]
    n_done: int
    n_planned: int
    seconds_left: float | None
    is_resumed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialCut:
    """The end of the budget broke off the running trial, which has no row."""

    id: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PickMade:
    name: str  # "throughput", "efficiency", "recommended"
    trial: Trial
    rule: str


SearchEvent = SearchStarted | SearchNoted | TrialStarted | TrialProgressed | TrialDone | TurnsDone | TrialCut | PickMade
OnEvent = Callable[[SearchEvent], None]
