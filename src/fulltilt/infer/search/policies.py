"""Choose how a candidate puts requests together, by simulation on its service surface."""

import dataclasses
import math
from collections.abc import Sequence

from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.simulate import (
    GIVE_UP_S,
    Arrivals,
    Service,
    compute_quantile_s,
    estimate_capacity,
    estimate_offline_samples_per_s,
    simulate_responses_s,
)
from fulltilt.records import Plan

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TOKENS_OF_LONGEST = (2, 4, 8, 16)  # bounds of a batch's padded elements, in samples of the longest length
N_CLOSELY = 3  # policies whose capacity is found: it takes many simulations
TIE = 0.01  # a simpler policy this close is preferred: the simulation is not that exact


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What the search is to find the most of.

    Attributes:
        quantile, limit_s: Of the response; None: no target for it, and throughput decides.
        batch_limit_s: Of the model's call for one batch.
    """

    requests_per_s: float | None = None
    samples_per_request: int = 1
    quantile: float = 0.99
    limit_s: float | None = None
    batch_limit_s: float | None = None
    memory_gib: float | None = None

    @property
    def is_capacity(self) -> bool:
        return self.limit_s is not None and self.requests_per_s is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rated:
    """A policy with what the simulation says of it: at the goal's load, and the most requests within its limit."""

    policy: Policy
    samples_per_s: float
    response_s: float | None = None
    capacity_requests_per_s: float | None = None

    @property
    def score(self) -> float:
        return self.samples_per_s if self.capacity_requests_per_s is None else self.capacity_requests_per_s


def list_policies(lengths: Sequence[int], plan: Plan) -> list[Policy]:
    """List policies, simpler ones first. Lengths are rounded up only where each shape is recorded anew."""
    longest = max(lengths)
    if min(lengths) == longest:
        return [Policy(max_batch=batch) for batch in BATCHES]
    multiple = max(1, longest // 8) if plan.get("cuda_graphs") else 1
    return [
        Policy(max_batch=batch, max_tokens=tokens, length_multiple=multiple)
        for batch in BATCHES
        for tokens in (None, *(longest * n for n in TOKENS_OF_LONGEST if n < batch))
    ]


def choose_policy(
    policies: Sequence[Policy], service: Service, lengths: Sequence[int], goal: Goal, arrivals: Arrivals
) -> Rated:
    """Choose the best policy, of those whose largest batch takes no longer than the goal allows."""
    longest, rated = max(lengths), []
    for policy in policies:
        largest = int(max(1, min(policy.max_batch, (policy.max_tokens or math.inf) // longest)))
        if largest > 1 and service.estimate_s(largest, longest) > (goal.batch_limit_s or math.inf):
            continue
        rate, response_s = estimate_offline_samples_per_s(lengths, policy, service), None
        if goal.requests_per_s is not None:
            give_up_s = GIVE_UP_S if goal.limit_s is None else 4 * goal.limit_s
            responses_s = simulate_responses_s(arrivals, goal.requests_per_s, policy, service, give_up_s=give_up_s)
            response_s = compute_quantile_s(responses_s, goal.quantile)
        rated.append(Rated(policy=policy, samples_per_s=rate, response_s=response_s))
    if goal.is_capacity:
        by_rate = sorted(rated, key=lambda each: -each.samples_per_s)[:N_CLOSELY]
        by_response = sorted(rated, key=lambda each: each.response_s or math.inf)[:N_CLOSELY]
        rated = [_rate_capacity(each, service, goal, arrivals) for each in dict.fromkeys((*by_rate, *by_response))]
    best = max(each.score for each in rated)
    return min(rated, key=lambda each: (each.score < (1 - TIE) * best, policies.index(each.policy)))


def _rate_capacity(rated: Rated, service: Service, goal: Goal, arrivals: Arrivals) -> Rated:
    assert goal.limit_s is not None
    at_most = rated.samples_per_s / goal.samples_per_request
    limits = {"quantile": goal.quantile, "limit_s": goal.limit_s, "at_most": at_most}
    return dataclasses.replace(
        rated, capacity_requests_per_s=estimate_capacity(arrivals, rated.policy, service, **limits)
    )
