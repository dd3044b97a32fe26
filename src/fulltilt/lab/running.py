"""Run the queue: settle what a dead scheduler left, then start, watch and settle attempts until none is left.

Each iteration reads the queue anew, so a cancel by another process is seen. Every attempt ends through ``settle``.
"""

from __future__ import annotations

import contextlib
import platform
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fulltilt.lab.local import LocalExecutor, Slot, find_result
from fulltilt.lab.points import build_words, write_words
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.scheduler import plan_starts
from fulltilt.lab.states import OWNED
from fulltilt.lab.stopping import StopRequest
from fulltilt.lab.store import StaleAttemptError, Store
from fulltilt.lab.verdict import judge_end, read_document

TURN_S = 0.1
CANCEL_GRACE_S = 10.0  # for a last checkpoint, before SIGKILL


def recover(lab: Path, store: Store, executor: LocalExecutor) -> int:
    """Settle attempts that a dead scheduler left and return their number. Only the lab's owner may call it."""
    owned = store.read_experiments(states=OWNED)
    for experiment in owned:
        settle(lab, store, executor, experiment.newest, code=None)
    return len(owned)


def settle(lab: Path, store: Store, executor: LocalExecutor, attempt: Attempt, **seen: Any) -> None:
    """Move an ended attempt to its final state, once, and end any process it left.

    Args:
        seen: What was seen of its end, as ``judge_end`` takes it.
    """
    executor.end_leftovers(attempt)
    while True:
        (experiment,) = store.read_experiments(id=attempt.experiment)
        try:
            if experiment.state == "finalizing":
                store.advance("commit", attempt)
                return
            document = read_document(find_result(lab, attempt))
            verdict = judge_end(document=document, is_cancelled=experiment.state == "cancelling", **seen)
            noted = {"outcome": verdict.outcome, "reason": verdict.reason, "metrics": verdict.metrics}
            store.advance(verdict.arrow, attempt, ended_s=time.time(), **noted)
            if verdict.arrow != "finish":
                return
        except StaleAttemptError:  # it was cancelled since the queue was read
            continue


def run_queue(lab: Path, store: Store, executor: LocalExecutor, *, stop: StopRequest, tell: Callable[[], None]) -> None:
    """Run all queued experiments, or until ``stop``: running trainings then save and are queued again.

    Args:
        tell: Called at every iteration.
    """
    cancelled_s: dict[Attempt, float] = {}
    told_to_stop: set[Attempt] = set()
    try:
        while True:
            for attempt, code in executor.poll():
                settle(lab, store, executor, attempt, code=code, is_stopping=stop.number is not None)
            if stop.number is None:
                _start_queued(lab, store, executor)
            tell()
            if not executor.running:
                return
            _cancel_wished(store, executor, cancelled_s)
            if stop.number is not None:
                _stop_all(executor, stop, told_to_stop)
            time.sleep(TURN_S)
    finally:
        for attempt in executor.running:  # after an error: the next start settles what this leaves in the store
            executor.end_leftovers(attempt)


def _start_queued(lab: Path, store: Store, executor: LocalExecutor) -> None:
    while free := executor.free:
        starts = plan_starts(store.read_experiments(states=("queued",), limit=len(free)), free)
        for experiment, slot in starts:
            # One that was cancelled since the queue was read is left alone.
            with contextlib.suppress(StaleAttemptError):
                _start(lab, store, executor, experiment, slot)
        if not starts:
            return


def _start(lab: Path, store: Store, executor: LocalExecutor, experiment: Experiment, slot: Slot) -> None:
    attempt = store.lease(experiment, node=platform.node(), devices=[slot.name], n_threads=slot.n_threads)
    source, config = store.read_work(attempt.experiment)
    try:
        title = " ".join([source.name, *write_words(experiment.point), *experiment.overrides])
        pid = executor.start(attempt, slot, source, build_words(config), title=title)
    except OSError as error:
        settle(lab, store, executor, attempt, code=None, refusal=f"it cannot be started: {error.strerror}")
        return
    store.advance("start", attempt, pid=pid)


def _cancel_wished(store: Store, executor: LocalExecutor, cancelled_s: dict[Attempt, float]) -> None:
    """End the trainings of cancelled experiments by SIGTERM, and by SIGKILL if that takes too long."""
    for experiment in store.read_experiments(states=("cancelling",)):
        attempt, now_s = experiment.newest, time.monotonic()
        if attempt not in executor.running:
            continue
        if attempt not in cancelled_s:
            cancelled_s[attempt] = now_s
            executor.send(attempt, signal.SIGTERM)
        elif now_s - cancelled_s[attempt] > CANCEL_GRACE_S:
            executor.end_leftovers(attempt)


def _stop_all(executor: LocalExecutor, stop: StopRequest, told: set[Attempt]) -> None:
    """Forward the stop signal so that trainings save; kill them if it comes again."""
    for attempt in executor.running:
        if stop.is_urgent:
            executor.end_leftovers(attempt)
        elif attempt not in told:
            told.add(attempt)
            executor.send(attempt, signal.SIGINT if stop.number == signal.SIGINT else signal.SIGTERM)
