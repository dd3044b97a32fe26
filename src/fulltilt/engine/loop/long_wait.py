"""Says why a run stands still while it waits for a batch that does not come."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fulltilt.data import GuardedLoader
from fulltilt.engine.announce import Announcer
from fulltilt.hardware import describe_process_state

if TYPE_CHECKING:
    from fulltilt.engine.loop.session import Session


def watch_loaders(s: Session) -> None:
    """Have both loaders of a run tell when they wait long, from the thread that waits."""
    for split, loader in (("training", s.run.loader), ("validation", s.validation)):
        if isinstance(loader, GuardedLoader):
            # Not the session: the loader would keep it, and its model, until the collector comes by.
            loader.on_long_wait = functools.partial(_tell, s.announce, split)


def _tell(announce: Announcer, split: str, seconds: float, pids: Sequence[int], due_from: int | None) -> None:
    workers = "; ".join(
        f"data worker {number} of {len(pids)} (pid {pid}) {describe_process_state(pid)}"
        for number, pid in enumerate(pids, start=1)
    )
    due = "" if due_from is None else f"; the next one is due from data worker {due_from + 1}"
    said = (
        f"no {split} batch came for {seconds:.0f} s, and batches come in order: {workers}{due}; with data.num_workers "
        "0 the data set is read in the training process, where Ctrl-C shows the line"
    )
    announce.note(said, level="warning")
    if not announce.listeners:  # a rank that is not the first: its last words are told where it is found to hang
        print(said, file=sys.stderr, flush=True)
