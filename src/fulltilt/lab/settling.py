"""Settle what ended: judge it once, put the files of a result in place, and take note of machines that fail."""

import contextlib
import random
import time

from fulltilt.errors import StorageError
from fulltilt.lab.lab import Lab, find_out_dir
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.scheduling.retries import choose_sequel, judge_node
from fulltilt.lab.states import LIVE
from fulltilt.lab.store import StaleAttemptError

CANCELLED = {"cancel": "cancelled", "pause": "paused"}


def settle(lab: Lab, attempt: Attempt, end: End) -> str:
    """Move an ended attempt on, once, and return the state of its experiment.

    Raises:
        StaleAttemptError: another attempt has begun.
    """
    while True:
        (experiment,) = lab.store.read_experiments(id=attempt.experiment)
        if experiment.attempt != attempt.number:
            raise StaleAttemptError(f"{attempt.experiment} is at attempt {experiment.attempt}, not {attempt.number}")
        if experiment.state == "finalizing":
            return finalize(lab, attempt)
        if experiment.state not in LIVE:
            return experiment.state  # settled before: whoever asks again gets the same answer
        try:
            _advance(lab, experiment, end)
        except StaleAttemptError:  # it was cancelled since it was read
            continue


def finalize(lab: Lab, attempt: Attempt) -> str:
    """Put the files of an accepted result in place, and return the state. May be repeated."""
    folder = find_out_dir(lab.folder, attempt.experiment)
    try:
        for artefact in lab.store.read_artefacts(attempt.experiment):
            if artefact.attempt == attempt.number:
                lab.depot.link(artefact.digest, folder / artefact.name)
        arrow, reason = "commit", None
    except StorageError as error:
        if not lab.store.has_room():
            raise  # the queue waits until there is room
        arrow, reason = "spoil", str(error)
    with contextlib.suppress(StaleAttemptError):  # another thread of the server was faster
        lab.store.advance(arrow, attempt, reason=reason)
    (experiment,) = lab.store.read_experiments(id=attempt.experiment)
    return experiment.state


def _advance(lab: Lab, experiment: Experiment, end: End) -> None:
    attempt = experiment.newest
    sequel = choose_sequel(end.outcome, wish=experiment.wish, n_lost=experiment.n_lost, draw=random.random())
    is_wished = sequel.arrow in ("end", "park")
    outcome = CANCELLED[experiment.wish or ""] if is_wished else end.outcome
    noted = {"outcome": outcome, "reason": outcome if is_wished else end.reason, "metrics": dict(end.metrics)}
    lab.store.advance(sequel.arrow, attempt, delay_s=sequel.delay_s, n_lost=sequel.n_lost, ended_s=time.time(), **noted)
    lab.metrics.ends.labels(outcome).inc()
    lab.leases.forget(attempt)
    lab.wishes.pop(attempt, None)
    for node in lab.store.read_nodes():
        if node.name == experiment.node and not is_wished:
            n_bad, last_bad = judge_node(node, end.outcome, experiment.id)
            if (n_bad, last_bad) != (node.n_bad, node.last_bad):
                lab.store.mark_node(node.name, n_bad=n_bad, last_bad=last_bad)
    lab.woken.set()
