"""Simulate the queue before the model in virtual time, with the batcher's own decision and measured service times."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from fulltilt.infer.manifest import Policy
from fulltilt.infer.serve.batcher import choose_batch

N_REQUESTS = 1000
N_SAMPLES = 6000  # of all requests: of large ones fewer are simulated
N_LEAST = 400  # what a p99 needs
GIVE_UP_S = 30.0  # that the oldest waits: the queue grows, and no percentile means anything
SEED = 7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What the simulation knows of a server.

    Attributes:
        estimate_s: (samples, padded length) → seconds of the model's call.
        request_s: Seconds that a request takes beside the model while others go on, of which one is drawn for each.
        sample_s: Seconds beside the call that each of its samples keeps the model from the next batch.
    """

    estimate_s: Callable[[int, int], float]
    request_s: Sequence[float] = (0.0,)
    sample_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Requests of a Poisson process at one request a second, each with the lengths of its samples.

    The same requests, only faster, make any load: so candidates and loads are compared on the same chance.
    """

    unit_s: list[float]
    lengths: list[list[int]]

    def cut(self, n: int) -> "Arrivals":
        """Keep the first ``n``."""
        return Arrivals(unit_s=self.unit_s[:n], lengths=self.lengths[:n])


@dataclasses.dataclass(slots=True)
class Sample:
    """A sample that waits, as the batcher sees it."""

    length: int
    request: int


def draw_arrivals(values: Sequence[int], samples_per_request: int, *, n: int | None = None) -> Arrivals:
    """Draw the requests that the load generator sends: real samples in turn, at times of a Poisson process."""
    n = n or max(N_LEAST, min(N_REQUESTS, N_SAMPLES // samples_per_request))
    lengths = [[values[(first + i) % len(values)] for i in range(samples_per_request)] for first in range(n)]
    return Arrivals(unit_s=np.cumsum(np.random.default_rng(0).exponential(1.0, n)).tolist(), lengths=lengths)


def simulate_responses_s(
    arrivals: Arrivals, requests_per_s: float, policy: Policy, service: Service, *, give_up_s: float = GIVE_UP_S
) -> list[float]:
    """Simulate one worker that is never idle by choice → seconds from arrival to answer of each request.

    Returns nothing where the oldest waits longer than ``give_up_s``.
    """
    due_s, rng = [unit_s / requests_per_s for unit_s in arrivals.unit_s], np.random.default_rng(SEED)
    beside_s = rng.choice(np.asarray(service.request_s), len(due_s)).tolist()
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
        now_s += estimate_batch_s(batch, policy, service) + service.sample_s * len(batch)
        for sample in batch:
            left[sample.request] -= 1
            if not left[sample.request]:
                responses_s[sample.request] = now_s + beside_s[sample.request] - due_s[sample.request]
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
        seconds += estimate_batch_s(batch, policy, service)
    return len(values) / seconds
