"""Find the highest rate that a server answers within a limit, by doubling and then halving."""

import dataclasses
import math
from collections.abc import Callable, Iterator

from fulltilt.infer.load.outcome import LoadOutcome

GAP = 1.1  # between the highest rate that was met and the lowest that was not
MAX_TRIES = 14


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FoundRate:
    """The load at the highest rate that was accepted, and the lowest rate that was not, infinite where none was."""

    accepted: LoadOutcome | None
    refused_per_s: float
    tries: tuple[LoadOutcome, ...]


def find_rate(
    load_at: Callable[[float], LoadOutcome], start_per_s: float, *, min_per_s: float, max_per_s: float
) -> Iterator[FoundRate]:
    """Yield what is found after each try, until the highest rate that is met is within 10 % of one that is not.

    Below ``min_per_s`` too few responses come for a proof.
    ``load_at`` loads the server at a rate. Each try may accept a rate wrongly: its test takes 1 / MAX_TRIES of alpha.
    """
    accepted, met_per_s, refused_per_s, tries = None, 0.0, math.inf, ()
    rate_per_s = min(max(start_per_s, min_per_s), max_per_s)
    while len(tries) < MAX_TRIES and refused_per_s > max(GAP * met_per_s, min_per_s) and met_per_s < max_per_s:
        tries = (*tries, outcome := load_at(rate_per_s))
        if outcome.verdict == "met":
            accepted, met_per_s = outcome, rate_per_s
        else:
            refused_per_s = rate_per_s
        yield FoundRate(accepted=accepted, refused_per_s=refused_per_s, tries=tries)
        if math.isinf(refused_per_s):
            rate_per_s = min(2 * met_per_s, max_per_s)
        else:
            rate_per_s = max(math.sqrt(met_per_s * refused_per_s) or refused_per_s / 2, min_per_s)
