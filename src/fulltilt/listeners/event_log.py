"""``EventLog``: every event of a run as one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path

from fulltilt.listeners._append import AppendFile
from fulltilt.records import Event, RunEnded, encode


class EventLog:
    """Appends ``{"event": "StepsDone", …fields}`` to ``events.jsonl``.

    Nothing is ever removed: after a resume the repeated steps are there twice, told apart by ``attempt`` and
    by the ``RunStarted`` in front of them. A loss that is not finite is ``null``.
    """

    def __init__(self, out_dir: str | Path):
        self.path = Path(out_dir) / "events.jsonl"
        self._file = AppendFile(self.path)

    def __call__(self, event: Event) -> None:
        self._file.append(json.dumps({"event": type(event).__name__, **encode(event)}, ensure_ascii=False))
        if isinstance(event, RunEnded):
            self._file.close()
