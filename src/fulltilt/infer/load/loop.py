"""Send requests in an open loop: they arrive on a fixed schedule, and the time they wait counts.

All arrival times are drawn before the first request is answered, so a worker that stalls cannot slow its own load down
(coordinated omission). One worker answers the requests in order.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable


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


def serve(
    arrivals_s: Iterable[float | None],
    handle: Callable[[], float],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    is_enough: Callable[[list[Answer]], bool] = lambda answers: False,
) -> list[Answer]:
    """Answer every request in order, none before it is due, and return the times of each.

    Args:
        arrivals_s: When each is due; None: when the one before is answered, so that nothing is said about waiting.
        handle: Answers one request → seconds of the model's call in it.
        is_enough: Called with all answers after each of them; ends the load when it returns True.
    """
    answers: list[Answer] = []
    begin_s = clock()
    for arrival_s in arrivals_s:
        due_s = clock() - begin_s if arrival_s is None else arrival_s
        if (early_s := due_s - (clock() - begin_s)) > 0:
            sleep(early_s)
        start_s = clock() - begin_s
        call_s = handle()
        answers.append(Answer(due_s=due_s, start_s=start_s, end_s=clock() - begin_s, call_s=call_s))
        if is_enough(answers):
            break
    return answers
