"""Send requests in an open loop: they arrive on a fixed schedule, and the time they wait counts.

All arrival times are drawn before the first request is answered, so a worker that stalls cannot slow its own load down
(coordinated omission). One worker answers the requests in order.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

MIN_REQUESTS = 100
"""For a mean, a maximum and a median, which need no upper bound from the order of the values, or nearly none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The times of one answered request, in seconds since the load began.

    Attributes:
        due_s: When it was scheduled to arrive.
        start_s: When the worker began to answer it.
        call_s: How long the model's call took.
    """

    due_s: float
    start_s: float
    end_s: float
    call_s: float

    @property
    def response_s(self) -> float:
        """Seconds from the scheduled arrival to the answer, waiting included."""
        return self.end_s - self.due_s


def draw_arrivals_s(n_requests: int, requests_per_s: float, *, seed: int) -> list[float]:
    """Draw the arrival times of a Poisson process: independent, exponential gaps."""
    gaps_s = np.random.default_rng(seed).exponential(1 / requests_per_s, n_requests)
    return np.cumsum(gaps_s).tolist()


def count_needed_requests(quantile: float, confidence: float = 0.95) -> int:
    """Return how many requests an upper bound of ``quantile`` needs: 368 for 0.99, 72 for 0.95.

    The largest of n values is below the true quantile with probability quantile^n; that has to be within one tail.
    """
    return math.ceil(math.log(0.5 - confidence / 2) / math.log(quantile))


def serve(
    arrivals_s: Sequence[float],
    handle: Callable[[], float],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    tell: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answer every request in order, none before it is due, and return the times of each.

    Args:
        handle: Answers one request → seconds of the model's call in it.
        tell: Called after each answer, for progress.
    """
    answers: list[Answer] = []
    begin_s = clock()
    for due_s in arrivals_s:
        early_s = due_s - (clock() - begin_s)
        if early_s > 0:
            sleep(early_s)
        start_s = clock() - begin_s
        call_s = handle()
        answers.append(Answer(due_s=due_s, start_s=start_s, end_s=clock() - begin_s, call_s=call_s))
        tell()
    return answers
