"""Find the rank whose failure ended a run, among those that failed only because their connection to it broke."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from fulltilt.engine.ranks.process import Failure
from fulltilt.errors import DeviceMemoryError, FulltiltError, RankFailedError, RankHungError, WorkerDiedError
from fulltilt.records import Evidence, classify_outcome

# Errors of a collective whose other side went away; never the cause of a run's end while there is another one.
CONSEQUENCES = ("DistBackendError", "DistNetworkError", "DistStoreError")
CONSEQUENCE_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Says why a rank left the run early: it failed, died or hung."""

    rank: int
    kind: Literal["failed", "died", "hung"]
    text: str
    failure: Failure | None = None
    exit_code: int | None = None  # of one that died

    @property
    def is_consequence(self) -> bool:
        """Return whether this rank failed only because another one was gone."""
        if self.failure is None or self.failure.error is not None or self.is_out_of_memory:
            return False
        text = self.failure.message.lower()
        return self.failure.type_name in CONSEQUENCES or any(word in text for word in CONSEQUENCE_WORDS)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the rank raised an error of memory, in whichever spelling."""
        if self.failure is None:
            return False
        evidence = Evidence(exception_type=self.failure.type_name, message=self.failure.message)
        return classify_outcome(evidence)[0] == "out_of_memory"

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed: not where the configuration, the data or the recipe is wrong."""
        error = self.failure.error if self.failure is not None else None
        return error is None or isinstance(error, WorkerDiedError)

    def build_error(self) -> FulltiltError:
        """Build the error to raise: the rank's own where it is one of fulltilt's."""
        error = self.failure.error if self.failure is not None else None
        if error is None and self.is_out_of_memory:
            error = DeviceMemoryError(self.text)
        elif error is None:
            error = (RankHungError if self.kind == "hung" else RankFailedError)(self.text, rank=self.rank)
        if self.failure is not None:
            error.__cause__ = _RemoteError(f"\n{self.failure.trace}")
        return error


class _RemoteError(Exception):
    """The trace of an exception in a rank, printed where the error of this process is."""


def find_cause(causes: Sequence[Cause]) -> Cause | None:
    """Return the first cause that is no consequence of another one, else the first; None where there is none."""
    return next((cause for cause in causes if not cause.is_consequence), next(iter(causes), None))
