"""Find the highest rate of requests that a server answers within a limit, by doubling and then halving the gap."""

import dataclasses
import math
from collections.abc import Callable

from fulltilt.infer.load.outcome import LoadOutcome

GAP = 1.1  # between the highest rate that was met and the lowest that was not
MAX_TRIES = 14


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoundRate:
    """The highest rate that was accepted.

    Attributes:
        accepted: The load at it; None: none was accepted.
        refused_per_s: The lowest rate above it that was not.
    """

    accepted: LoadOutcome | None
    refused_per_s: float | None
    tries: tuple[LoadOutcome, ...]


def find_rate(
    load_at: Callable[[float], LoadOutcome], start_per_s: float, *, min_per_s: float, max_per_s: float
) -> FoundRate:
    """Try rates until the highest that is met is within 10 % of one that is not.

    Below ``min_per_s`` too few responses come for a proof.
    ``load_at`` loads the server at a rate. Each try may accept a rate wrongly: its test takes 1 / MAX_TRIES of alpha.
    """
    tries: list[LoadOutcome] = []
    accepted: LoadOutcome | None = None
    met_per_s, refused_per_s = 0.0, math.inf
    rate_per_s = min(max(start_per_s, min_per_s), max_per_s)
    while len(tries) < MAX_TRIES:
        outcome = load_at(rate_per_s)
        tries.append(outcome)
        if outcome.verdict == "met":
            met_per_s, accepted = rate_per_s, outcome
        else:
            refused_per_s = rate_per_s
        if refused_per_s <= GAP * met_per_s or met_per_s >= max_per_s or refused_per_s <= min_per_s:
            break
        rate_per_s = max(_choose_next(met_per_s, refused_per_s, max_per_s), min_per_s)
    return FoundRate(
        accepted=accepted, refused_per_s=refused_per_s if refused_per_s < math.inf else None, tries=tuple(tries)
    )


def _choose_next(met_per_s: float, refused_per_s: float, max_per_s: float) -> float:
    if met_per_s == 0:
        return refused_per_s / 2
    return min(2 * met_per_s, max_per_s) if math.isinf(refused_per_s) else math.sqrt(met_per_s * refused_per_s)
