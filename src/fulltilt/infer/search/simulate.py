"""Simulate the queue before the model in virtual time, with the batcher's own decision and measured service times."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from fulltilt.infer.manifest import Policy
from fulltilt.infer.serve.batcher import choose_batch

N_REQUESTS = 1500
N_SAMPLES = 6000  # of all requests: of large ones fewer are simulated
N_LEAST = 400  # what a p99 needs
N_CAPACITY_STEPS = 7
GIVE_UP_S = 30.0  # that the oldest waits: the queue grows, and no percentile means anything
SEED = 7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What the simulation knows of a server.

    Attributes:
        estimate_s: (samples, padded length) → seconds of the model's call.
        jitter: Factors that single calls take, drawn at random.
        request_s: Seconds that each request takes beside the model, not shared with others.
        batch_s: Seconds that each batch takes beside the model's call.
    """

    estimate_s: Callable[[int, int], float]
    jitter: Sequence[float] = (1.0,)
    request_s: float = 0.0
    batch_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Requests of a Poisson process at one request a second, each with the lengths of its samples.

    The same requests, only faster, make any load: so candidates and loads are compared on the same chance.
    """

    unit_s: tuple[float, ...]
    lengths: tuple[tuple[int, ...], ...]

    def list_due_s(self, requests_per_s: float) -> list[float]:
        return [unit_s / requests_per_s for unit_s in self.unit_s]


@dataclasses.dataclass(slots=True)
class Sample:
    """A sample that waits, as the batcher sees it."""

    length: int
    request: int


def draw_arrivals(values: Sequence[int], samples_per_request: int, *, n: int | None = None) -> Arrivals:
    """Draw requests whose samples have lengths of real ones."""
    rng = np.random.default_rng(SEED)
    n = n or max(N_LEAST, min(N_REQUESTS, N_SAMPLES // samples_per_request))
    chosen = rng.choice(np.asarray(values), (n, samples_per_request))
    return Arrivals(
        unit_s=tuple(np.cumsum(rng.exponential(1.0, n)).tolist()),
        lengths=tuple(tuple(row) for row in chosen.tolist()),
    )


def simulate_responses_s(
    arrivals: Arrivals, requests_per_s: float, policy: Policy, service: Service, *, give_up_s: float = GIVE_UP_S
) -> list[float]:
    """Simulate one worker that is never idle by choice → seconds from arrival to answer of each request.

    Returns nothing where the oldest waits longer than ``give_up_s``.
    """
    due_s, rng = arrivals.list_due_s(requests_per_s), np.random.default_rng(SEED)
    factors = iter(rng.choice(np.asarray(service.jitter), sum(map(len, arrivals.lengths))).tolist())
    left = [len(lengths) for lengths in arrivals.lengths]
    responses_s = [0.0] * len(due_s)
    waiting: list[Sample] = []
    now_s, n_arrived = 0.0, 0
    while waiting or n_arrived < len(due_s):
        if not waiting:
            now_s = max(now_s, due_s[n_arrived])
        while n_arrived < len(due_s) and due_s[n_arrived] <= now_s:
            waiting += [Sample(length, n_arrived) for length in arrivals.lengths[n_arrived]]
            n_arrived += 1
        if now_s - due_s[waiting[0].request] > give_up_s:
            return []
        batch, waiting = take_batch(waiting, policy)
        now_s += service.batch_s + next(factors) * estimate_batch_s(batch, policy, service)
        for sample in batch:
            left[sample.request] -= 1
            if not left[sample.request]:
                responses_s[sample.request] = now_s + service.request_s - due_s[sample.request]
    return responses_s


def take_batch(waiting: list[Sample], policy: Policy) -> tuple[list[Sample], list[Sample]]:
    """Take the batch that the server would take → the batch, and who goes on waiting."""
    chosen = choose_batch(waiting, policy)
    taken = set(chosen)
    return [waiting[i] for i in chosen], [sample for i, sample in enumerate(waiting) if i not in taken]


def estimate_batch_s(batch: Sequence[Sample], policy: Policy, service: Service) -> float:
    longest = max(sample.length for sample in batch)
    return service.estimate_s(len(batch), -(-longest // policy.length_multiple) * policy.length_multiple)


def compute_quantile_s(responses_s: Sequence[float], quantile: float) -> float:
    """Compute a percentile of the responses; infinite where there are none."""
    return float(np.quantile(responses_s, quantile, method="inverted_cdf")) if responses_s else math.inf


def estimate_offline_samples_per_s(values: Sequence[int], policy: Policy, service: Service) -> float:
    """Estimate the throughput where all samples wait from the beginning."""
    waiting, seconds = [Sample(length, 0) for length in values], 0.0
    while waiting:
        batch, waiting = take_batch(waiting, policy)
        seconds += service.batch_s + estimate_batch_s(batch, policy, service)
    return len(values) / seconds


def estimate_capacity(
    arrivals: Arrivals, policy: Policy, service: Service, *, quantile: float, limit_s: float, at_most: float
) -> float:
    """Estimate the most requests a second of which the quantile of the response stays within the limit; 0: none."""

    def is_within(rate: float) -> bool:
        responses_s = simulate_responses_s(arrivals, rate, policy, service, give_up_s=4 * limit_s)
        return compute_quantile_s(responses_s, quantile) <= limit_s

    low, high = math.log(at_most / 100), math.log(at_most)
    if not is_within(math.exp(low)):
        return 0.0
    for _ in range(N_CAPACITY_STEPS):
        middle = (low + high) / 2
        if is_within(math.exp(middle)):
            low = middle
        else:
            high = middle
    return math.exp(low)
