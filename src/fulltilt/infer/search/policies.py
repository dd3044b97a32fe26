"""Choose how a candidate puts requests together, by simulation on its service surface."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.simulate import (
    GIVE_UP_S,
    Arrivals,
    Service,
    compute_quantile_s,
    estimate_offline_samples_per_s,
    simulate_responses_s,
)

BATCHES = (1, 2, 4, 8, 16, 32, 64)
TOKENS_OF_LONGEST = (2, 4, 8, 16)  # bounds of a batch's padded elements, in samples of the longest length
N_CAPACITY_STEPS = 6
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


class Rated(NamedTuple):
    """A policy with what the simulation says of it: at the goal's load, and the most requests within its limit."""

    policy: Policy
    samples_per_s: float
    response_s: float | None = None
    capacity_requests_per_s: float | None = None


def list_policies(lengths: Sequence[int]) -> list[Policy]:
    """List policies, simpler ones first."""
    longest = max(lengths)
    multiples = TOKENS_OF_LONGEST if min(lengths) < longest else ()
    return [
        Policy(max_batch=batch, max_tokens=tokens)
        for batch in BATCHES
        for tokens in (None, *(longest * n for n in multiples if n < batch))
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
        rated.append(Rated(policy, rate, response_s))
    if goal.is_capacity:
        by_rate = sorted(rated, key=lambda each: -each.samples_per_s)[:N_CLOSELY]
        by_response = sorted(rated, key=lambda each: each.response_s or math.inf)[:N_CLOSELY]
        rated = [
            each._replace(capacity_requests_per_s=estimate_capacity(arrivals, each.policy, service, goal, most_per_s))
            for each in dict.fromkeys((*by_rate, *by_response))
            if (most_per_s := each.samples_per_s / goal.samples_per_request)
        ]
    scores = [each.capacity_requests_per_s if goal.is_capacity else each.samples_per_s for each in rated]
    ties = [each for each, score in zip(rated, scores, strict=True) if (score or 0.0) >= (1 - TIE) * max(scores)]
    return min(ties, key=lambda each: policies.index(each.policy))


def estimate_capacity(arrivals: Arrivals, policy: Policy, service: Service, goal: Goal, at_most_per_s: float) -> float:
    """Estimate the most requests a second that keep the goal's limit; 0 where a hundredth of the bound misses it."""
    limit_s = goal.limit_s or math.inf

    def is_within(rate: float) -> bool:
        responses_s = simulate_responses_s(arrivals, rate, policy, service, give_up_s=4 * limit_s)
        return compute_quantile_s(responses_s, goal.quantile) <= limit_s

    low, high = at_most_per_s / 100, at_most_per_s
    if not is_within(low):
        return 0.0
    for _ in range(N_CAPACITY_STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if is_within(middle) else (low, middle)
    return low
