"""Choose among candidates that were offered: the Pareto front, and the one to serve."""

import math
from collections.abc import Sequence

from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import OFFERED, Candidate


def find_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Find the offered candidates that no other one equals in all respects and beats in one."""
    offered = [each for each in candidates if each.status in OFFERED and each.samples_per_s is not None]
    merits = {each.name: _list_merits(each) for each in offered}
    return [
        each
        for each in offered
        if not any(_dominates(merits[other.name], merits[each.name]) for other in offered if other is not each)
    ]


def choose(candidates: Sequence[Candidate], goal: Goal) -> Candidate:
    """Choose the candidate to serve: the most requests within the limit, else the most samples."""
    offered = [each for each in candidates if each.status in OFFERED and each.samples_per_s is not None]
    accepted = [each for each in offered if each.live is not None and each.live.verdict == "met"]
    return max(accepted or offered, key=lambda each: _score(each, goal))


def _score(candidate: Candidate, goal: Goal) -> float:
    score = candidate.capacity_requests_per_s if goal.is_capacity else candidate.samples_per_s
    return score or 0.0


def _list_merits(candidate: Candidate) -> tuple[float, ...]:
    """List what is better the larger it is; what is unknown is worst."""
    accuracy = candidate.accuracy  # None: of eager fp32 alone
    kept = math.inf if accuracy is None else accuracy.sqnr_db
    if accuracy is not None and accuracy.changed_labels_pct is not None:
        kept = -accuracy.changed_labels_pct
    response_s = candidate.live.measured_s if candidate.live else candidate.response_s
    return (
        candidate.samples_per_s or 0.0,
        kept,
        -(candidate.memory_gib or math.inf),
        0.0 if response_s is None else -response_s,
    )


def _dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    return all(x >= y for x, y in zip(a, b, strict=True)) and any(x > y for x, y in zip(a, b, strict=True))
