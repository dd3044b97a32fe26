"""Events to listeners. A full disk in a log file is told and does not end the run; a bug in a listener does."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from fulltilt.errors import StorageError
from fulltilt.records import Event, Listener, Noted, RunEnded


def describe_resume(step: int, n_epochs_done: int, n_epochs: int, max_steps: float = math.inf) -> str:
    """What a resumed run goes on from; that nothing is left, where it has trained for as long as it is asked to."""
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

    A listener that cannot store an event (StorageError, OSError) is named once in a ``Noted`` to the others and
    asked again at the next event: space may have been freed. Any other error of a listener ends the run.

    Attributes:
        has_listeners: False when an event would be built for nobody.
        notes: Every note of the run, for the result.
    """

    def __init__(self, listeners: Sequence[Listener], *, attempt: int = 0):
        self._listeners = tuple(listeners)
        self.has_listeners = bool(listeners)
        self._attempt = attempt
        self._n_lost: dict[int, int] = {}
        self.notes: list[str] = []

    def __call__(self, kind: type[Event], **fields: Any) -> None:
        if not self.has_listeners:
            return
        if kind is RunEnded:
            self._tell_losses()
        self._send(kind(attempt=self._attempt, time_s=time.time(), **fields))

    def hand_on(self, event: Event) -> None:
        """An event that another process built."""
        if isinstance(event, RunEnded):
            self._tell_losses()
        self._send(event)

    def note(self, message: str, *, level: str = "note") -> None:
        self.notes.append(message)
        self(Noted, message=message, level=level)

    def _send(self, event: Event) -> None:
        failed = []
        for index, listener in enumerate(self._listeners):
            try:
                listener(event)
            except (StorageError, OSError) as error:
                self._n_lost[index] = self._n_lost.get(index, 0) + 1
                if self._n_lost[index] == 1:
                    what = type(event).__name__
                    failed.append(f"{_name(listener)} could not store {what} ({error}); training goes on")
        for message in failed:
            self.note(message, level="warning")

    def _tell_losses(self) -> None:
        lost = {index: count for index, count in self._n_lost.items() if count > 1}
        for index, count in lost.items():
            self.note(f"{_name(self._listeners[index])} failed to store events {count} times", level="warning")


def _name(listener: Listener) -> str:
    return getattr(listener, "__name__", type(listener).__name__)
