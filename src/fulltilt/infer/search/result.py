"""The records of a search: what became of each candidate, and its result, which ``--json`` writes.

``result.json`` has the fields of ``SearchResult``; more may join. Status of a candidate:

- chosen, offered: proven faster than eager in turns, accurate, and (with a target for the response) accepted live.
- baseline: eager fp32, which is always there.
- slower: not proven faster than eager. behind: measured, and left out because others were faster.
- refused: its outputs differ too much, its optimisation did nothing, or a target is missed.
- failed, out_of_memory, timeout: it could not be built or ended while it was measured.
- untried: the budget was over.
"""

import dataclasses
from typing import Literal

from fulltilt.infer.manifest import Accuracy, Policy, Promise
from fulltilt.infer.search.lengths import Lengths
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.surface import Surface
from fulltilt.records import VERSION, Machine, Plan

Status = Literal[
    "chosen", "offered", "baseline", "slower", "behind", "refused", "failed", "out_of_memory", "timeout", "untried"
]
OFFERED: tuple[Status, ...] = ("chosen", "offered", "baseline")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times as many samples a second as the base, in turns.

    Attributes:
        ci: Interval at 98 %; null bounds before the second group of processes.
    """

    times: float
    ci: tuple[float | None, float | None]
    verdict: str
    n_groups: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What the served artefact did under the load of the targets.

    Attributes:
        verdict: met, missed or not proven, by the sequential test.
        predicted_s: What the simulation said of the same load.
    """

    verdict: str
    requests_per_s: float
    quantile: float
    limit_s: float
    measured_s: float | None
    predicted_s: float | None
    n_responses: int
    why: str | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Candidate:
    """One plan, with all that is known of it.

    Attributes:
        samples_per_s: Offline, on real samples with the best policy: measured in turns where ``gain`` is there,
            else estimated from the surface.
        response_s: Estimated quantile of the response at the load of the targets; ``live`` has the measured one.
        memory_gib: The most that its process held while it answered.
    """

    name: str
    plan: Plan
    status: Status = "untried"
    reason: str | None = None
    folder: str | None = None
    build_s: float | None = None
    cold_start_s: float | None = None
    accuracy: Accuracy | None = None
    policy: Policy | None = None
    samples_per_s: float | None = None
    gain: Gain | None = None
    response_s: float | None = None
    capacity_requests_per_s: float | None = None
    memory_gib: float | None = None
    live: Live | None = None
    surface: Surface | None = None

    def drop(self, status: Status, reason: str) -> None:
        self.status, self.reason = status, reason


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The result of a search.

    Attributes:
        gain_over_naive: Over eager fp32 with batches in order of arrival, padded to the longest sample there is.
        front: Candidates that no offered one beats in throughput, accuracy, memory and response at once.
        not_applicable: Combinations that cannot be built here → why.
        cpu_pressure_pct: While finalists took turns: of the time, that in which a task waited for a core, at most.
        next: The command that serves the chosen artefact.
    """

    version: int = VERSION
    workload: str
    device: str
    goal: Goal
    lengths: Lengths
    chosen: str
    gain: Gain | None
    gain_over_naive: Gain | None
    artefact: str
    promise: Promise | None
    front: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    not_applicable: dict[str, str]
    strategy: str
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
