"""Simulate the queue before the model in virtual time, with the batcher's own decision and measured service times.

The service surface says how long a batch of so many samples of such a length takes.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from fulltilt.infer.manifest import Policy
from fulltilt.infer.serve.batcher import choose_batch
from fulltilt.levers.inference.cuda_graphs import round_shape

BATCHES = (1, 2, 4, 16, 64)  # that are measured; between them it is close to linear
SHARES = (0.25, 0.75, 1.0)  # of the samples: the lengths that are measured are the longest of these
MAX_CALL_S = 1.0  # slower calls are not measured: smaller batches are as fast a sample long before
Point = tuple[int, int]  # a shape that is measured: length, and samples of a batch, all of that length

N_REQUESTS = 1000
N_SAMPLES = 6000  # of all requests: of large ones fewer are simulated
N_LEAST = 400  # what a p99 needs
GIVE_UP_S = 30.0  # that the oldest waits: the queue grows, and no percentile means anything
SEED = 7


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """What the simulation knows of a server.

    Attributes:
        estimate_s: (samples, padded length) → seconds of the model's call on an idle machine.
        call_s, request_s: Seconds that calls take longer in a server, and requests beside the model while others go
            on; one is drawn for each. A search knows none; a server that was measured has some.
        sample_s: Seconds beside the call that each of its samples keeps the model from the next batch.
    """

    estimate_s: Callable[[int, int], float]
    call_s: Sequence[float] = (0.0,)
    request_s: Sequence[float] = (0.0,)
    sample_s: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Surface:
    """Seconds of a call at the measured points; between them linear, beyond them as between the last two."""

    points: tuple[Point, ...]
    seconds: tuple[float, ...]
    is_recorded: bool = False  # by CUDA graphs, up to whose shapes batches are filled

    def build_service(self) -> Service:
        rows: dict[int, list[tuple[int, float]]] = {}
        for (length, batch), seconds in sorted(zip(self.points, self.seconds, strict=True)):
            rows.setdefault(length, []).append((batch, seconds))

        @functools.cache  # a simulation asks a million times
        def estimate_s(batch: int, length: int) -> float:
            if self.is_recorded:
                batch, length = round_shape(batch, length, max(rows))
            return _interpolate([(at, _interpolate(row, batch)) for at, row in rows.items()], length)

        return Service(estimate_s=estimate_s)


def plan_points(lengths: Sequence[int], one_s: float, *, is_coarse: bool, max_batch: int) -> list[Point]:
    """Plan the points of a surface.

    Args:
        lengths: Of real samples.
        one_s: Seconds of one sample of the longest length in eager mode.
        is_coarse: A few points, enough to see who has no chance.
    """
    batches, shares = ((1, 16), SHARES[1:]) if is_coarse else (BATCHES, SHARES)
    chosen = np.unique(np.quantile(lengths, shares, method="higher")).tolist()
    most = {length: min(max_batch, MAX_CALL_S / one_s * max(lengths) / length) for length in chosen}
    return [(length, batch) for length in chosen for batch in batches if batch <= max(1, most[length])]


def _interpolate(line: Sequence[tuple[int, float]], at: int) -> float:
    """Interpolate between neighbours; beyond the ends go on from the last two, never below a tenth of the nearest."""
    if len(line) == 1:
        return line[0][1] * max(1.0, at / line[0][0])
    i = min(max(bisect.bisect_left(line, at, key=lambda each: each[0]), 1), len(line) - 1)
    (x0, y0), (x1, y1) = line[i - 1], line[i]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), min(y0, y1) / 10)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """Requests of a Poisson process at one request a second, each with the lengths of its samples.

    The same requests, only faster, make any load: so candidates and loads are compared on the same chance.
    """

    unit_s: list[float]
    lengths: list[list[int]]


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
    longer_s = iter(rng.choice(np.asarray(service.call_s), sum(left)).tolist())  # no more calls than samples
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
        longest = max(sample.length for sample in batch)
        now_s += service.estimate_s(len(batch), longest) + next(longer_s) + service.sample_s * len(batch)
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


def compute_quantile_s(responses_s: Sequence[float], quantile: float) -> float:
    """Compute a percentile of the responses; infinite where there are none."""
    return float(np.quantile(responses_s, quantile, method="inverted_cdf")) if responses_s else math.inf


def estimate_offline_samples_per_s(values: Sequence[int], policy: Policy, service: Service) -> float:
    """Estimate the throughput where all samples wait from the beginning."""
    waiting, seconds = [Sample(length, 0) for length in values], 0.0
    while waiting:
        batch, waiting = take_batch(waiting, policy)
        seconds += service.estimate_s(len(batch), max(sample.length for sample in batch))
    return len(values) / seconds
