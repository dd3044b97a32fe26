"""Run the queue: settle what ended, wake what waited, and start what is next, turn after turn.

All that a turn decides it reads from the store, so a server that was killed goes on where it was.
"""

import contextlib
import dataclasses
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from fulltilt.errors import StorageError
from fulltilt.lab.executors import AwayError, Executor, Place, RefusedError
from fulltilt.lab.lab import Lab
from fulltilt.lab.records import Attempt, Experiment
from fulltilt.lab.runner.order import Order
from fulltilt.lab.scheduling.ends import End
from fulltilt.lab.scheduling.order import Room, Start, plan_starts
from fulltilt.lab.scheduling.retries import is_barred
from fulltilt.lab.server_log import tell
from fulltilt.lab.settling import NO_ROOM, finalize, settle
from fulltilt.lab.states import LIVE, OWNED
from fulltilt.lab.store import StaleAttemptError, compute_digest

TURN_S = 0.25
REST_S = 0.05  # after every turn, so that many ends in a row do not keep it busy
LEASED_AT_ONCE = 8  # in one transaction; if the server is killed then, so many at most begin anew
PAUSE_S = 1.0  # after a turn that failed
TOLD_AT_ONCE = 1000  # changes of state in a turn
BUSY_S = 10.0  # a device that others use for so long is told; what our own attempts leave is gone sooner
HAND_IN_TERMS = 6  # of a lease: what was told to end and is heard ends its training itself, and sends what that saved
LOOKED_AT = 64  # queued experiments of an owner in a turn, beyond those that fit now
GONE = End(outcome="lost", reason="its process is gone, and nobody saw its end")
ENDED_WITH_SERVER = End(outcome="preempted", reason="its server was gone")
EXPIRED = End(outcome="lost", reason="nothing was heard of it for the whole term of its lease")
logger = logging.getLogger(__name__)


class Coordinator:
    """Schedules the experiments of one lab on the machines of its executors.

    Args:
        write_order: Builds the order for an attempt from its token, mark and node; it knows the server's address.
    """

    def __init__(
        self,
        lab: Lab,
        executors: Sequence[Executor],
        write_order: Callable[..., Order],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._lab, self._executors, self._write_order = lab, {each.name: each for each in executors}, write_order
        self._clock = clock
        self._awake_s: dict[Attempt, float] = {}  # when what waits in backoff has waited enough
        self._asked_s: dict[Attempt, float] = {}  # when what shall end was told to
        self._busy_s: dict[tuple[str, str], float] = {}  # since when others use a device; once it is told, for ever
        self._unbegun: set[Attempt] = set()  # what waits in an engine's own queue
        self._unplaced: set[Attempt] = set()  # results whose files could not be put in place, which was told
        self._is_over = threading.Event()
        self.is_draining = False  # starts nothing any more
        self.knows_depot = True  # else a result's files would look lost
        self._told = lab.store.read_last_event()
        self._inherited = {each.newest for each in lab.store.read_experiments(states=LIVE)}

    def run(self) -> None:
        """Take turns until ``stop``."""
        while not self._is_over.is_set():
            try:
                with self._lab.metrics.turn_s.time():
                    self.turn()
                self._tell_changes()
            except StorageError as error:  # the disk is full, or the database is away: nothing is lost, all waits
                logger.warning("the queue waits: %s", error)
                self._is_over.wait(PAUSE_S)
            except Exception:  # the last resort of a thread that nobody waits for: what is stored stays true
                logger.exception("a turn of the queue failed, and the next one tries again")
                self._is_over.wait(PAUSE_S)
            self._is_over.wait(REST_S)
            self._lab.woken.wait(TURN_S)
            self._lab.woken.clear()
        with contextlib.suppress(StorageError):
            self._tell_changes()

    def stop(self) -> None:
        self._is_over.set()
        self._lab.woken.set()

    def turn(self) -> None:
        under_way = self._lab.store.read_experiments(states=(*OWNED, "backoff"))
        live = [experiment for experiment in under_way if experiment.state in LIVE]
        self._end_expired(live)
        self._settle_gone(live)
        self._end_wished(live)
        for experiment in under_way:
            if experiment.state == "finalizing" and self.knows_depot:
                self._finalize(experiment)
        if not self.is_draining and self._lab.store.has_room():
            self._wake([experiment for experiment in under_way if experiment.state == "backoff"])
            self._start(live)

    def is_idle(self) -> bool:
        """Return whether nothing is under way and, unless it drains, nothing waits for its turn."""
        states = self._lab.store.count_states()
        return not any(states.get(state) for state in (OWNED if self.is_draining else (*OWNED, "queued", "backoff")))

    def read_rooms(self) -> list[Room]:
        """Return the machines of all executors, as if nothing ran on them."""
        return [
            _build_room(place, (), is_barred=False)
            for executor in self._executors.values()
            for place in executor.read_places()
        ]

    def end_all(self, *, is_urgent: bool) -> None:
        """Ask every live attempt of our engines to save and end, or end it at once. It is queued again."""
        for experiment in self._lab.store.read_experiments(states=LIVE):
            if experiment.engine in self._executors:
                self._executors[experiment.engine].cancel(experiment, is_urgent=is_urgent)

    def _tell_changes(self) -> None:
        """Write to the log which states have changed since the last call, by whomever."""
        self._told = min(self._told, self._lab.store.read_last_event())  # the newest may have been removed
        for event in self._lab.store.read_events(after=self._told, limit=TOLD_AT_ONCE):
            said = {"experiment": event.experiment, "attempt": event.attempt, "arrow": event.arrow}
            told = tell("state", **said, state=event.state)
            logger.info("%s is %s", event.experiment, event.state, extra=told)
            self._told = event.seq

    def _end_expired(self, live: Sequence[Experiment]) -> None:
        expired = set(self._lab.leases.turn(experiment.newest for experiment in live))
        for experiment in live:
            if experiment.newest in expired:
                self._settle(experiment, EXPIRED)

    def _settle_gone(self, live: Sequence[Experiment]) -> None:
        self._unbegun = set()
        for executor in self._executors.values():
            mine = [experiment for experiment in live if experiment.engine == executor.name]
            seen = executor.poll(mine) if mine else {}
            for experiment in mine:
                if seen.get(experiment.id) == "waiting":  # it has no process that could renew its lease
                    self._lab.leases.renew(experiment.newest)
                    self._unbegun.add(experiment.newest)
                elif seen.get(experiment.id) == "gone":
                    found_none = experiment.state == "leased"  # its runner began, and no server was there to answer
                    is_nobodys_fault = experiment.newest in self._inherited and (found_none or not executor.is_lasting)
                    self._settle(experiment, ENDED_WITH_SERVER if is_nobodys_fault else GONE)

    def _settle(self, experiment: Experiment, end: End) -> None:
        with contextlib.suppress(StaleAttemptError):  # its runner was faster
            settle(self._lab, experiment.newest, end)

    def _finalize(self, experiment: Experiment) -> None:
        """Put its files in place. Where a disk does not answer that is tried again, and the others go on."""
        try:
            finalize(self._lab, experiment.newest)
        except StorageError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno in NO_ROOM:
                raise  # the queue waits until there is room
            if experiment.newest not in self._unplaced:
                self._unplaced.add(experiment.newest)
                told = tell("unplaced", experiment=experiment.id, attempt=experiment.attempt)
                said = "%s has succeeded, and its files cannot be put in place yet: %s"
                logger.warning(said, experiment.id, error, extra=told)

    def _end_wished(self, live: Sequence[Experiment]) -> None:
        """Tell the engine too what the next renewal tells the runner, and end by force what takes too long."""
        now_s, engines = self._clock(), self._executors
        wished = [(each, engines[each.engine]) for each in live if each.wish and each.engine in engines]
        self._asked_s = {each.newest: self._asked_s.get(each.newest, now_s) for each, _ in wished}
        term, silent = self._lab.term, self._lab.leases.list_stale()
        for each, executor in wished:
            patience_s = term.grace_s if each.newest in silent else HAND_IN_TERMS * term.ttl_s
            if each.newest in self._unbegun or now_s - self._asked_s[each.newest] > patience_s:
                executor.cancel(each, is_urgent=True)

    def _wake(self, waiting: Sequence[Experiment]) -> None:
        now_s, wall_s = self._clock(), time.time()
        due_s = {each.newest: now_s + _compute_rest_s(each, wall_s) for each in waiting}
        self._awake_s = {newest: self._awake_s.get(newest, at_s) for newest, at_s in due_s.items()}
        for experiment in waiting:
            if self._awake_s[experiment.newest] <= now_s:
                with contextlib.suppress(StaleAttemptError):
                    self._lab.store.advance("wake", experiment.newest)

    def _start(self, in_use: Sequence[Experiment]) -> None:
        """Start what fits beside ``in_use``; devices of what ended in this turn are free in the next."""
        if not self._lab.store.read_heads(1):
            self._busy_s = {}
            return
        barred = {node.name for node in self._lab.store.read_nodes() if is_barred(node)}
        used: Counter[str] = Counter()
        for experiment in in_use:
            used[experiment.owner] += experiment.n_devices
        found = {name: self._read_takers(executor) for name, executor in self._executors.items()}
        self._tell_busy((place for places in found.values() for place in places.values()), in_use)
        for name, places in found.items():
            present = {place.node for place in places.values() if not place.is_away}
            out = barred if not barred.issuperset(present) else set()  # where there is no other, it has to do
            rooms = [
                _build_room(place, in_use, is_barred=place.is_away or place.node in out, unbegun=self._unbegun)
                for place in places.values()
            ]
            n_free = sum(len(room.free) for room in rooms if not room.is_barred)
            if not n_free:
                continue
            heads = self._lab.store.read_heads(n_free + LOOKED_AT)
            avoid = {each.id: each.last_node for each in heads if each.n_lost and each.last_node}
            starts = plan_starts(heads, rooms, in_use=used, avoid=avoid)
            for first in range(0, len(starts), LEASED_AT_ONCE):
                self._lease(self._executors[name], starts[first : first + LEASED_AT_ONCE], places)
            for start in starts:  # an owner's share counts over all engines
                used[start.experiment.owner] += start.experiment.n_devices

    def _read_takers(self, executor: Executor) -> dict[str, Place]:
        """Return the machines that are not leaving, with what they say themselves of devices that others use."""
        heard, places = self._lab.machines.copy(), {place.node: place for place in executor.read_places()}
        for node, place in places.items():
            if node in heard:
                places[node] = dataclasses.replace(place, busy={**place.busy, **heard[node].busy})
            elif place.says_itself:  # this server has just started: every device would look free
                places[node] = dataclasses.replace(place, is_away=True)
        return {node: place for node, place in places.items() if node not in heard or not heard[node].is_leaving}

    def _tell_busy(self, places: Iterable[Place], in_use: Sequence[Experiment]) -> None:
        """Write to the log, once, which devices are left alone since others use them."""
        taken, now_s = {(each.node, device) for each in in_use for device in each.devices}, self._clock()
        busy = {(place.node, device): shown for place in places for device, shown in place.busy.items()}
        self._busy_s = {key: self._busy_s.get(key, now_s) for key in busy.keys() - taken}
        for key in sorted(key for key, since_s in self._busy_s.items() if now_s - since_s > BUSY_S):
            told = tell("device_busy", node=key[0], device=key[1])
            logger.warning("%s of %s is left alone until it is free: %s", key[1], key[0], busy[key], extra=told)
            self._busy_s[key] = math.inf

    def _lease(self, executor: Executor, starts: Sequence[Start], places: Mapping[str, Place]) -> None:
        wanted = []
        for start in starts:
            n_threads = places[start.node].n_threads
            place = {"node": start.node, "devices": start.devices, "engine": executor.name}
            wanted.append((start.experiment, place | {"n_threads": n_threads and n_threads * len(start.devices)}))
        for start, found in zip(starts, self._lab.store.lease_all(wanted), strict=True):
            if found is not None:  # else cancelled since the queue was read
                self._begin(executor, start, *found)

    def _begin(self, executor: Executor, start: Start, attempt: Attempt, token: str) -> None:
        self._lab.leases.renew(attempt)
        mark = f"{attempt.experiment}/{attempt.number}/{compute_digest(token)[:16]}"
        try:
            order = self._write_order(token=token, mark=mark, node=start.node)
            ref = executor.submit(attempt, order, start.node, start.devices)
        except RefusedError as error:
            told = tell("engine_refused", experiment=attempt.experiment, attempt=attempt.number, engine=executor.name)
            logger.warning("%s is refused by %s: %s", attempt.experiment, executor.name, error, extra=told)
            outcome = "preempted" if isinstance(error, AwayError) else "infra_refused"
            settle(self._lab, attempt, End(outcome=outcome, reason=str(error)))
            return
        self._lab.store.note(attempt, ref=ref)


def _compute_rest_s(experiment: Experiment, wall_s: float) -> float:
    """Compute how long an experiment has to wait yet; what passed under an earlier server counts.

    Else many restarts would keep it waiting for ever. A wall clock that was set back makes no wait longer.
    """
    waited_s = max(0.0, wall_s - (experiment.ended_s or wall_s))
    return max(0.0, (experiment.delay_s or 0.0) - waited_s)


def _build_room(
    place: Place, in_use: Sequence[Experiment], *, is_barred: bool, unbegun: Collection[Attempt] = ()
) -> Room:
    here = [experiment for experiment in in_use if experiment.node == place.node]
    taken = {device for experiment in here for device in experiment.devices}
    n_begun = sum(len(experiment.devices) for experiment in here if experiment.newest not in unbegun)
    free = [device for device in place.devices if device not in taken and device not in place.busy]
    n_of_others = max(0, place.n_used - n_begun)  # which ones these are nobody says
    return Room(node=place.node, free=free[n_of_others:], n_devices=len(place.devices), is_barred=is_barred)
