"""Cancel one experiment, with or without a running scheduler."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from fulltilt.errors import RunFolderError
from fulltilt.lab.local import LocalExecutor
from fulltilt.lab.records import Experiment
from fulltilt.lab.running import TURN_S, settle
from fulltilt.lab.states import OVER
from fulltilt.lab.store import StaleAttemptError, Store
from fulltilt.records.run_folder import hold_folder

ARROW_FROM = {"queued": "drop", "leased": "cancel", "running": "cancel"}


def cancel(lab: Path, store: Store, experiment: str) -> Experiment:
    """Cancel an experiment and wait until it has ended. The request is stored first and outlives this process.

    Returns:
        The final state; a training that finished before the signal arrived has succeeded.
    """
    while True:
        (found,) = store.read_experiments(id=experiment)
        if found.state in OVER:
            return found
        if found.state in ARROW_FROM:
            try:
                store.advance(ARROW_FROM[found.state], found.newest)
            except StaleAttemptError:  # the scheduler was faster: look again
                continue
        elif not _settle_ownerless(lab, store, found):
            time.sleep(TURN_S)


def is_held(lab: Path) -> bool:
    """Return whether a scheduler is running in the lab."""
    with contextlib.suppress(RunFolderError), hold_folder(lab):
        return False
    return True


def _settle_ownerless(lab: Path, store: Store, experiment: Experiment) -> bool:
    """Settle the experiment here if no scheduler runs, and return whether that was so."""
    with contextlib.suppress(RunFolderError), hold_folder(lab):
        settle(lab, store, LocalExecutor(lab, ()), experiment.newest, code=None)
        return True
    return False
