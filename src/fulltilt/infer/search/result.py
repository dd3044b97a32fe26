"""The records of a search: what became of each candidate, and its result, which ``--json`` writes.

``result.json`` has the fields of ``SearchResult``; more may join. ``reason`` says why one was dropped. Status:

- chosen, offered: proven faster than eager in turns, accurate, and (with a target for the response) accepted live.
- baseline: eager fp32, which is always there.
- slower: not proven faster than eager. behind: measured, and left out because others were faster.
- refused: its outputs differ too much, its optimisation did nothing, or a target is missed.
- failed, out_of_memory, timeout: it could not be built or ended while it was measured.
- untried: the budget left no time; the reason says before what.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

from fulltilt.infer.manifest import Accuracy, Policy, Promise
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.simulate import Surface
from fulltilt.records import VERSION, Machine, Plan
from fulltilt.stats import Comparison

Status = Literal[
    "chosen", "offered", "baseline", "slower", "behind", "refused", "failed", "out_of_memory", "timeout", "untried"
]
OFFERED: tuple[Status, ...] = ("chosen", "offered", "baseline")
OVER = "the budget left no time before"  # begins every reason of what there was no time for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What the served artefact did under the load of the targets.

    Attributes:
        verdict: met, missed or not proven, by the sequential test.
    """

    verdict: str
    requests_per_s: float
    quantile: float
    limit_s: float
    samples_per_request: int = 1
    measured_s: float | None = None
    n_responses: int = 0
    why: str | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Candidate:
    """One plan, with all that is known of it.

    Attributes:
        gain: Over eager, in turns.
        samples_per_s: Offline, on real samples with the best policy: measured in turns where ``gain`` is there,
            else estimated from the surface.
        response_s: Estimated quantile of the response at the load of the targets; ``live`` has the measured one.
        memory_gib: The most that its process held in the last group that measured it; of a finalist, with its policy.
    """

    name: str
    plan: Plan
    status: Status = "untried"
    reason: str | None = None
    build_s: float | None = None
    cold_start_s: float | None = None
    accuracy: Accuracy | None = None
    policy: Policy | None = None
    samples_per_s: float | None = None
    gain: Comparison | None = None
    response_s: float | None = None
    capacity_requests_per_s: float | None = None
    memory_gib: float | None = None
    live: Live | None = None
    surface: Surface | None = None

    def drop(self, status: Status, reason: str) -> None:
        self.status, self.reason = status, reason

    @property
    def is_alive(self) -> bool:
        """Whether it is still in the search."""
        return self.status == "untried" and self.reason is None

    def score(self, goal: Goal) -> float:
        """Return what the search finds the most of: requests/s within the limit, else samples/s."""
        return (self.capacity_requests_per_s if goal.is_capacity else self.samples_per_s) or 0.0

    def list_merits(self) -> tuple[float, ...]:
        """List what is better the larger it is; what is unknown is worst."""
        accuracy = self.accuracy  # None: of eager fp32 alone
        kept = math.inf if accuracy is None else accuracy.sqnr_db
        if accuracy is not None and accuracy.changed_labels_pct is not None:
            kept = -accuracy.changed_labels_pct
        response_s = self.live.measured_s if self.live else None  # what is simulated is no measured one's equal
        return self.samples_per_s or 0.0, kept, -(self.memory_gib or math.inf), -(response_s or math.inf)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        lengths: Of real samples, in their order; all 1 where no input varies.
        front: Candidates that no offered one beats in throughput, accuracy, memory and response at once.
        not_applicable: Combinations that cannot be built here → why.
        cpu_pressure_pct: While finalists took turns: of the time, that in which a task waited for a core, at most.
        next: The command that serves the chosen artefact.
    """

    version: int = VERSION
    workload: str
    device: str
    goal: Goal
    lengths: tuple[int, ...]
    chosen: str
    gain: Comparison | None
    artefact: str
    promise: Promise | None
    front: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    not_applicable: dict[str, str]
    seconds: float
    budget_s: float
    n_groups: int
    next: str
    notes: tuple[str, ...]
    cpu_pressure_pct: float | None
    out_dir: str
    utc: str
    machine: Machine

    def find(self, name: str) -> Candidate:
        return next(each for each in self.candidates if each.name == name)


def find_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Find the offered candidates that no other one equals in all respects and beats in one."""
    measured = _list_measured(candidates)
    merits = {each.name: each.list_merits() for each in measured}
    beats = lambda a, b: a != b and all(x >= y for x, y in zip(a, b, strict=True))  # noqa: E731
    return [each for each in measured if not any(beats(other, merits[each.name]) for other in merits.values())]


def choose(candidates: Iterable[Candidate], goal: Goal) -> Candidate:
    """Choose the candidate to serve: the best that was accepted live, else the best that is offered."""
    offered = _list_measured(candidates)
    accepted = [each for each in offered if each.live is not None and each.live.verdict == "met"]
    return max(accepted or offered, key=lambda each: each.score(goal))


def _list_measured(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [each for each in candidates if each.status in OFFERED and each.samples_per_s is not None]
