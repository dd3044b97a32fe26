"""Send the events of a run to its listeners, and describe errors and resumed runs in words."""

import math
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from fulltilt.errors import StorageError
from fulltilt.records import Event, Evidence, Listener, Noted, RunEnded, classify_outcome

E = TypeVar("E", bound=Event)


def read_first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out, on a device or on the host."""
    evidence = Evidence(exception_type=type(error).__name__, message=str(error))
    return isinstance(error, Exception) and classify_outcome(evidence)[0] == "out_of_memory"


def describe_resume(step: int, n_epochs_done: int, n_epochs: int, max_steps: float = math.inf) -> str:
    """Say where a resumed run goes on, or that nothing is left to train."""
    if step >= max_steps:
        return f"the checkpoint is at step {step:,}, and {max_steps:,.0f} are asked for: nothing is left to train"
    if n_epochs_done < n_epochs:
        return f"going on from step {step:,}, in epoch {n_epochs_done + 1} of {n_epochs}"
    done = f"the checkpoint is at step {step:,}, after {n_epochs_done} epoch{'s' if n_epochs_done > 1 else ''}"
    asked = "as many as" if n_epochs_done == n_epochs else "more than"
    more = f"--epochs {n_epochs_done + 1} trains one more"
    return f"{done}, {asked} the {n_epochs} asked for: nothing is left to train; {more}"


class Announcer:
    """Builds events and hands them to every listener.

    A listener that cannot store an event (StorageError, OSError) is named once in a ``Noted`` to the others, and asked
    again at the next event: space may have been freed. Any other error of a listener ends the run.

    Attributes:
        attempt: Number of the attempt that the events belong to.
        notes: Every note of the run, for the result.
    """

    def __init__(self, listeners: Sequence[Listener], *, attempt: int = 0):
        self.listeners = tuple(listeners)
        self.attempt = attempt
        self._n_lost = [0] * len(self.listeners)
        self.notes: list[str] = []

    def __call__(self, kind: type[E], **fields: Any) -> E:
        event = kind(attempt=self.attempt, time_s=time.time(), **fields)
        self.hand_on(event)
        return event

    def hand_on(self, event: Event) -> None:
        """Hand an event to the listeners; another process may have built it."""
        if isinstance(event, RunEnded):
            for listener, count in zip(self.listeners, self._n_lost, strict=True):
                if count > 1:
                    self.note(f"{_name(listener)} failed to store events {count} times", level="warning")
        failed = []
        for index, listener in enumerate(self.listeners):
            try:
                listener(event)
            except BrokenPipeError:  # nobody reads the screen any more, as behind ``| head``: nothing is lost
                continue
            except (StorageError, OSError) as error:
                self._n_lost[index] += 1
                if self._n_lost[index] == 1:
                    what = type(event).__name__
                    failed.append(f"{_name(listener)} could not store {what} ({error}); training goes on")
        for message in failed:
            self.note(message, level="warning")

    def note(self, message: str, *, level: str = "note") -> None:
        self.notes.append(message)
        self(Noted, message=message, level=level)

    def note_once(self, message: str, *, level: str = "note") -> None:
        """Note what an attempt of the same run may have said before."""
        if message not in self.notes:
            self.note(message, level=level)


def _name(listener: Listener) -> str:
    return getattr(listener, "__name__", type(listener).__name__)
