"""Rank the ways to put requests together for a candidate, by simulation on its service surface."""

import dataclasses
import math
from collections.abc import Sequence

from fulltilt.infer.manifest import Policy
from fulltilt.infer.search.lengths import Lengths
from fulltilt.infer.search.simulate import (
    Arrivals,
    Service,
    compute_quantile_s,
    estimate_capacity,
    estimate_offline_samples_per_s,
    simulate_responses_s,
)
from fulltilt.infer.search.surface import BATCHES
from fulltilt.records import Plan

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
    """A policy with what the simulation says of it.

    Attributes:
        response_s: The goal's quantile at its load; None: there is none.
        capacity_requests_per_s: Most requests a second within the limit; None: not asked.
    """

    policy: Policy
    samples_per_s: float
    response_s: float | None = None
    capacity_requests_per_s: float | None = None

    @property
    def score(self) -> float:
        """What the search maximises: samples/s within the limit, else samples/s."""
        return self.samples_per_s if self.capacity_requests_per_s is None else self.capacity_requests_per_s


def list_policies(lengths: Lengths, plan: Plan) -> list[Policy]:
    """List policies, simpler ones first. Lengths are rounded up only where each shape is recorded anew."""
    if not lengths.vary:
        return [Policy(max_batch=batch) for batch in BATCHES]
    multiple = max(1, lengths.longest // 8) if plan.get("cuda_graphs") else 1
    bounds = [None, *(lengths.longest * n for n in TOKENS_OF_LONGEST)]
    return [
        Policy(max_batch=batch, max_tokens=tokens, length_multiple=multiple)
        for batch in BATCHES
        for tokens in bounds
        if tokens is None or batch * lengths.longest > tokens
    ]


def rate_policies(policies: Sequence[Policy], service: Service, lengths: Lengths, goal: Goal, arrivals: Arrivals):
    """Rate policies, the best first; those whose largest batch would take longer than the goal allows come last."""
    rated = [
        Rated(policy=policy, samples_per_s=estimate_offline_samples_per_s(lengths.values, policy, service))
        for policy in policies
        if goal.batch_limit_s is None
        or policy.max_batch == 1
        or _estimate_worst_s(policy, service, lengths) <= goal.batch_limit_s
    ]
    rated.sort(key=lambda each: -each.samples_per_s)
    if goal.requests_per_s is not None:
        rated = [_rate_response(each, service, goal, arrivals) for each in rated]
    if goal.is_capacity:
        by_response = sorted(rated, key=lambda each: each.response_s or math.inf)
        close = list(dict.fromkeys((*rated[:N_CLOSELY], *by_response[:N_CLOSELY])))
        rated = [_rate_capacity(each, service, goal, arrivals) for each in close]
    best = max(each.score for each in rated)
    return sorted(rated, key=lambda each: (each.score < (1 - TIE) * best, policies.index(each.policy)))


def _rate_response(rated: Rated, service: Service, goal: Goal, arrivals: Arrivals) -> Rated:
    assert goal.requests_per_s is not None
    responses_s = simulate_responses_s(arrivals, goal.requests_per_s, rated.policy, service)
    return dataclasses.replace(rated, response_s=compute_quantile_s(responses_s, goal.quantile))


def _rate_capacity(rated: Rated, service: Service, goal: Goal, arrivals: Arrivals) -> Rated:
    assert goal.limit_s is not None
    at_most = rated.samples_per_s / goal.samples_per_request
    capacity = estimate_capacity(
        arrivals, rated.policy, service, quantile=goal.quantile, limit_s=goal.limit_s, at_most=at_most
    )
    return dataclasses.replace(rated, capacity_requests_per_s=capacity)


def _estimate_worst_s(policy: Policy, service: Service, lengths: Lengths) -> float:
    """Estimate the longest call that a policy allows."""
    samples = lambda length: min(policy.max_batch, (policy.max_tokens or math.inf) // length)  # noqa: E731
    return max(service.estimate_s(max(1, int(samples(length))), length) for length in lengths.edges)
