"""What ended a run over several ranks: of a rank that died and the others whose connection to it broke, the one that
died; and in which words it is told."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence
from typing import Literal, Protocol

from fulltilt.engine.ranks.process import PHASE, PHASES, STEP, Failure
from fulltilt.errors import DeviceMemoryError, FulltiltError, RankFailedError, RankHungError, WorkerDiedError
from fulltilt.records import Evidence, classify_outcome

# Errors of a collective whose other side went away; never the cause of a run's end while there is another one.
CONSEQUENCES = ("DistBackendError", "DistNetworkError", "DistStoreError")
CONSEQUENCE_WORDS = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why a run over several ranks ended before its end."""

    rank: int
    kind: Literal["failed", "died", "hung"]
    text: str
    failure: Failure | None = None

    @property
    def is_consequence(self) -> bool:
        """Whether it only says that another rank is gone."""
        if self.failure is None or self.failure.error is not None or self.is_out_of_memory:
            return False
        text = self.failure.message.lower()
        return self.failure.type_name in CONSEQUENCES or any(word in text for word in CONSEQUENCE_WORDS)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it raised that itself, in whichever spelling."""
        if self.failure is None:
            return False
        evidence = Evidence(exception_type=self.failure.type_name, message=self.failure.message)
        return classify_outcome(evidence)[0] == "out_of_memory"

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may end otherwise: not where the configuration, the data or the recipe is wrong."""
        error = self.failure.error if self.failure is not None else None
        return error is None or isinstance(error, WorkerDiedError)

    def build_error(self) -> FulltiltError:
        error = self.failure.error if self.failure is not None else None
        if error is None:
            error = self._build_own_error()
        if self.failure is not None:
            error.__cause__ = _RemoteError(self.failure.trace)
        return error

    def _build_own_error(self) -> FulltiltError:
        if self.is_out_of_memory:
            return DeviceMemoryError(self.text)
        return (RankHungError if self.kind == "hung" else RankFailedError)(self.text, rank=self.rank)


class _RemoteError(Exception):
    """The trace of an exception in a rank, printed where the error of this process is."""

    def __init__(self, trace: str):
        super().__init__(f"\n{trace}")


class Described(Protocol):
    """A rank as a message needs it."""

    def describe(self) -> str:
        """Its number, device and process."""
        ...

    def read_tail(self) -> str:
        """The last lines that it printed."""
        ...


def describe_failed(rank: Described, failure: Failure) -> str:
    if failure.error is not None:
        return f"{rank.describe()}: {failure.message}"
    return f"{rank.describe()} failed: {failure.type_name}: {failure.message} ({failure.where}){rank.read_tail()}"


def describe_died(rank: Described, code: int | None) -> str:
    if code is None or code >= 0:
        return f"{rank.describe()} ended with exit code {code} before its work was done{rank.read_tail()}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    why = ": most often by the kernel, where the machine has no memory left" if -code == signal.SIGKILL else ""
    return f"{rank.describe()} was killed by {name}{why}{rank.read_tail()}"


def describe_hung(rank: Described, cells: Sequence[int], seconds: float, remedy: str) -> str:
    return (
        f"{rank.describe()} hangs: for {seconds:.0f} s it has not come further than {PHASES[cells[PHASE]]}, after "
        f"step {cells[STEP]}, while another rank waits for it; {remedy}{rank.read_tail()}"
    )
