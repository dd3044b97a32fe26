"""Settle what ended: judge it once, put a result in place, and note machines that fail."""

import contextlib
import errno
import random
import time

from fulltilt.errors import StorageError
from fulltilt.lab.lab import Lab, find_out_dir
from fulltilt.lab.records import Artefact, Attempt, Experiment
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.scheduling.retries import choose_sequel, judge_node
from fulltilt.lab.states import ARROWS, LIVE
from fulltilt.lab.store import StaleAttemptError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
CANCELLED = {"cancel": "cancelled", "pause": "paused"}


def settle(lab: Lab, attempt: Attempt, end: End) -> str:
    """Move an ended attempt on, once, and return the state of its experiment.

    Raises:
        StaleAttemptError: another attempt has begun.
    """
    while (experiment := _read(lab, attempt)).state in LIVE:
        with contextlib.suppress(StaleAttemptError):  # it was cancelled since it was read
            state = _advance(lab, experiment, end)
            break
    else:
        state = experiment.state  # settled before: whoever asks again gets the same answer
    return finalize(lab, attempt) if state == "finalizing" else state


def finalize(lab: Lab, attempt: Attempt) -> str:
    """Put the files of an accepted result in place, and return the state. May be repeated.

    Raises:
        StorageError: they cannot be read or written now. What is missing for certain, or damaged, is spoilt instead.
    """
    folder = find_out_dir(lab.folder, attempt.experiment)
    try:
        for artefact in _list_files(lab, attempt):
            lab.depot.link(artefact.digest, folder / artefact.name)
        arrow, reason = "commit", None
    except StorageError as error:
        if isinstance(error.__cause__, OSError) or not lab.store.has_room():
            raise
        arrow, reason = "spoil", str(error)
    with contextlib.suppress(StaleAttemptError):  # another thread of the server was faster
        lab.store.advance(arrow, attempt, reason=reason)
        return ARROWS[arrow].target
    return _read(lab, attempt).state


def _list_files(lab: Lab, attempt: Attempt) -> list[Artefact]:
    return [file for file in lab.store.read_artefacts(attempt.experiment) if file.attempt == attempt.number]


def _read(lab: Lab, attempt: Attempt) -> Experiment:
    found = lab.store.read_experiments(id=attempt.experiment)
    if not found or found[0].attempt != attempt.number:
        said = f"at attempt {found[0].attempt}" if found else "gone"
        raise StaleAttemptError(f"attempt {attempt.number} of {attempt.experiment} is over: it is {said}")
    return found[0]


def _advance(lab: Lab, experiment: Experiment, end: End) -> str:
    """Take the arrow that an end leads to, and return the state. A result without files needs no second step."""
    attempt = experiment.newest
    sequel = choose_sequel(end.outcome, wish=experiment.wish, n_lost=experiment.n_lost, draw=random.random())
    is_wished = sequel.arrow in ("end", "park")
    outcome = CANCELLED[experiment.wish or ""] if is_wished else end.outcome
    noted = {"outcome": outcome, "reason": outcome if is_wished else end.reason, "metrics": dict(end.metrics)}
    then = "commit" if sequel.arrow == "finish" and not _list_files(lab, attempt) else None
    lab.store.advance(
        sequel.arrow, attempt, then=then, delay_s=sequel.delay_s, n_lost=sequel.n_lost, ended_s=time.time(), **noted
    )
    lab.metrics.ends.labels(outcome).inc()
    lab.leases.forget(attempt)
    lab.wishes.pop(attempt, None)
    for node in () if is_wished else lab.store.read_nodes(experiment.node or ""):
        n_bad, last_bad = judge_node(node, end.outcome, experiment.id)
        if (n_bad, last_bad) != (node.n_bad, node.last_bad):
            lab.store.mark_node(node.name, n_bad=n_bad, last_bad=last_bad)
    lab.woken.set()
    return ARROWS[then or sequel.arrow].target
