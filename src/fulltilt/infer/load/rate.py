"""Find the highest rate that a server answers within a limit, by doubling and then halving."""

import dataclasses
import math
from collections.abc import Callable, Sequence

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
    rate_per_s = min(max(start_per_s, min_per_s), max_per_s)
    while True:
        tries.append(load_at(rate_per_s))
        found = summarize_tries(tries)
        met_per_s, refused_per_s = _read_rate(found.accepted), found.refused_per_s or math.inf
        is_close = refused_per_s <= GAP * met_per_s or met_per_s >= max_per_s
        if is_close or refused_per_s <= min_per_s or len(tries) == MAX_TRIES:
            return found
        rate_per_s = max(_choose_next(met_per_s, refused_per_s, max_per_s), min_per_s)


def summarize_tries(tries: Sequence[LoadOutcome]) -> FoundRate:
    """Return the highest rate that was met, and the lowest that was not."""
    met = [outcome for outcome in tries if outcome.verdict == "met"]
    refused = [_read_rate(outcome) for outcome in tries if outcome.verdict != "met"]
    return FoundRate(
        accepted=max(met, key=_read_rate, default=None), refused_per_s=min(refused, default=None), tries=tuple(tries)
    )


def _read_rate(outcome: LoadOutcome | None) -> float:
    return 0.0 if outcome is None else outcome.plan.requests_per_s or 0.0


def _choose_next(met_per_s: float, refused_per_s: float, max_per_s: float) -> float:
    if met_per_s == 0:
        return refused_per_s / 2
    return min(2 * met_per_s, max_per_s) if math.isinf(refused_per_s) else math.sqrt(met_per_s * refused_per_s)
