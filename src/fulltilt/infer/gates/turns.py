"""Compare two runners in turns within one process: each answers the same batch right after the other."""

import math
import random
import time
from collections.abc import Callable, Sequence

from fulltilt.infer.joining import Sample
from fulltilt.stats import CONFIDENCE, compute_trimmed_interval

Answer = Callable[[Sample], Sample]
MIN_ROUNDS, MAX_ROUNDS = 6, 60


def measure_speed_up(
    base: Answer,
    other: Answer,
    batches: Sequence[Sample],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float, float]:
    """Return how many times as fast ``other`` is as ``base``, with a 98 % interval.

    It is the geometric mean over batches.

    A round is every batch by both, forwards and back; it is the unit of replication. The first one warms up.

    Args:
        limit_s: After so many seconds no further round begins, once there are six.
    """
    draws = random.Random(0)
    rounds: list[float] = []
    begin_s = time.monotonic()
    while len(rounds) <= MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.monotonic() - begin_s < limit_s):
        gains = []
        for batch in batches:
            order = [base, other] if draws.random() < 0.5 else [other, base]
            spent_s = {base: 0.0, other: 0.0}
            for run in (*order, *reversed(order)):
                start_s = clock()
                run(batch)
                spent_s[run] += clock() - start_s
            gains.append(math.log(max(spent_s[base], 1e-9) / max(spent_s[other], 1e-9)))
        rounds.append(sum(gains) / len(gains))
    centre, low, high = compute_trimmed_interval(rounds[1:], CONFIDENCE)
    return math.exp(centre), math.exp(low), math.exp(high)
