"""``EventLog``: every event of a run as one line of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from fulltilt.listeners._append import AppendFile
from fulltilt.listeners._held import HeldEvents
from fulltilt.records import CheckpointStarted, Event, RunEnded, encode

_JSON = json.JSONEncoder(ensure_ascii=False)  # json.dumps builds one for every call that is not its default


class EventLog:
    """Appends ``{"event": "StepsDone", …fields}`` to ``events.jsonl``.

    Nothing is ever removed: after a resume the repeated steps are there twice, told apart by ``attempt`` and
    by the ``RunStarted`` in front of them. A loss that is not finite is ``null``.

    Logging intervals are stored once a second (``_held.py``); what a checkpoint counts on is on the disk before it.
    """

    def __init__(self, out_dir: str | Path, *, clock: Callable[[], float] = time.monotonic):
        self.path = Path(out_dir) / "events.jsonl"
        self._file = AppendFile(self.path)
        self._held = HeldEvents(clock)

    def __call__(self, event: Event) -> None:
        due = self._held.add(event)
        if due:
            self._file.append([_JSON.encode({"event": type(e).__name__, **encode(e)}) for e in due])
        if isinstance(event, CheckpointStarted | RunEnded):
            self._file.sync()
        if isinstance(event, RunEnded):
            self._file.close()
