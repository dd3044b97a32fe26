"""Says why a run stands still while it waits for a batch that does not come."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fulltilt.data import GuardedLoader
from fulltilt.hardware import describe_process_state

if TYPE_CHECKING:
    from fulltilt.engine.session import Session


def watch_loaders(s: Session) -> None:
    """Have both loaders of a run tell when they wait long; from the main thread, which is the one that waits."""
    for split, loader in (("training", s.run.loader), ("validation", s.validation)):
        if isinstance(loader, GuardedLoader):
            loader.on_long_wait = functools.partial(_tell, s, split)


def _tell(s: Session, split: str, seconds: float, pids: Sequence[int]) -> None:
    workers = "; ".join(
        f"data worker {number} of {len(pids)} (pid {pid}) {describe_process_state(pid)}"
        for number, pid in enumerate(pids, start=1)
    )
    s.announce.note(f"no {split} batch came for {seconds:.0f} s, and batches come in order: {workers}", level="warning")
