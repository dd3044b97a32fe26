"""A lab's records in dictionaries: what the real store is held against, change by change."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections import Counter
from pathlib import Path

from fulltilt.lab.records import Attempt, Event, Experiment, Node, Token, Work
from fulltilt.lab.states import ARROWS
from fulltilt.lab.store import StaleAttemptError

OF_ATTEMPT = ("node", "devices", "n_threads", "pid", "started_s", "ended_s", "engine", "ref", "fence")


class MemoryStore:
    def __init__(self):
        self.sources, self.experiments, self.keys, self.attempts = {}, {}, {}, {}
        self.events, self.artefacts, self.nodes, self.tokens, self.fences, self.works = [], {}, {}, {}, {}, {}

    def close(self):
        pass

    def add(self, source, points, overrides, *, owner="", priority=0, n_devices=1, code=None):
        sweep, n_new = self._name_sweep(str(source)), 0
        for point in points:
            if (sweep, point.digest) in self.keys:
                continue
            id = f"e{len(self.experiments) + 1}"
            self.keys[sweep, point.digest] = id
            given = {"owner": owner, "priority": priority, "n_devices": n_devices, "overrides": list(overrides)}
            self.experiments[id] = Experiment(
                id=id, sweep=sweep, state="queued", attempt=0, point=dict(point.values), **given
            )
            self.works[id] = Work(source=Path(source), config=point.config, code=code)
            self._tell(id, 0, "submit", "queued")
            n_new += 1
        return n_new

    def retry(self, source, points, overrides, *, n_devices, code):
        n, sweep = 0, self.sources.get(source)
        for point in points:
            id = self.keys.get((sweep, point.digest))
            if id is None or self.experiments[id].state not in ARROWS["retry"].sources:
                continue
            sent = {"overrides": list(overrides), "n_devices": n_devices}
            self._move("retry", self.experiments[id].newest, delay_s=None, n_lost=0, **sent)
            self.works[id] = Work(source=Path(source), config=point.config, code=code)
            n += 1
        return n

    def _name_sweep(self, source):
        if source not in self.sources:
            stem = Path(source).stem
            names = itertools.chain([stem], (f"{stem}-{n}" for n in itertools.count(2)))
            self.sources[source] = next(name for name in names if name not in self.sources.values())
        return self.sources[source]

    def _tell(self, id, attempt, arrow, state):
        seq = len(self.events) + 1
        self.events.append(Event(seq=seq, experiment=id, attempt=attempt, arrow=arrow, state=state, time_s=time.time()))

    def _lease(self, experiment, *, node, devices, n_threads, engine):
        token, number = secrets.token_urlsafe(16), experiment.attempt + 1
        self._move("lease", experiment.newest, attempt=number)
        self.attempts[experiment.id, number] = {"node": node, "devices": list(devices), "n_threads": n_threads}
        self.attempts[experiment.id, number] |= {"engine": engine, "started_s": time.time(), "fence": token}
        self.fences[token] = Attempt(experiment=experiment.id, number=number)
        return self.fences[token], token

    def lease_all(self, wanted):
        found = []
        for experiment, place in wanted:
            try:
                found.append(self._lease(experiment, **place))
            except StaleAttemptError:
                found.append(None)
        return found

    def advance(self, arrow, attempt, *, then=None, delay_s=None, n_lost=None, **noted):
        before, n_events = self.experiments[attempt.experiment], len(self.events)
        self._move(arrow, attempt, delay_s=delay_s, **({} if n_lost is None else {"n_lost": n_lost}))
        if then is not None:
            try:
                self._move(then, attempt)
            except StaleAttemptError:
                self.experiments[attempt.experiment] = before
                del self.events[n_events:]
                raise
        if noted:
            self.note(attempt, **noted)

    def note(self, attempt, **noted):
        self.attempts.setdefault((attempt.experiment, attempt.number), {}).update(noted)

    def _move(self, name, at, **values):
        found, arrow = self.experiments[at.experiment], ARROWS[name]
        if found.state not in arrow.sources or found.attempt != at.number:
            raise StaleAttemptError
        self.experiments[at.experiment] = dataclasses.replace(found, state=arrow.target, wish=arrow.wish, **values)
        self._tell(at.experiment, values.get("attempt", at.number), name, arrow.target)

    def set_priority(self, experiment, priority):
        self.experiments[experiment] = dataclasses.replace(self.experiments[experiment], priority=priority)

    def read_experiments(
        self, *, states=None, id=None, owner=None, sweep=None, unchanged_since_s=None, limit=None, offset=0
    ):
        changed_s = {event.experiment: event.time_s for event in self.events}
        found = [
            self._complete(each)
            for each in self.experiments.values()
            if id in (None, each.id)
            and owner in (None, each.owner)
            and sweep in (None, each.sweep)
            and (states is None or each.state in states)
            and (unchanged_since_s is None or changed_s[each.id] < unchanged_since_s)
        ]
        if states is not None:
            found.sort(key=lambda each: -each.priority)
        return tuple(found[offset:][:limit])

    def _complete(self, found):
        row = self.attempts.get((found.id, found.attempt), {})
        left_out = OF_ATTEMPT if found.state == "queued" else ()
        values = {name: value for name, value in row.items() if name not in left_out and value is not None}
        return dataclasses.replace(found, last_node=row.get("node"), **values)

    def read_heads(self, limit):
        owners = dict.fromkeys(each.owner for each in self.experiments.values())
        return [
            each for owner in owners for each in self.read_experiments(states=("queued",), owner=owner, limit=limit)
        ]

    def read_newest(self, states, limit):
        order = dict.fromkeys(event.experiment for event in reversed(self.events))
        return tuple(self._complete(self.experiments[id]) for id in order if self.experiments[id].state in states)[
            :limit
        ]

    def count_states(self, *, sweep=None):
        found = [each.state for each in self.experiments.values() if sweep in (None, each.sweep)]
        return {state: found.count(state) for state in set(found)}

    def count_queued(self):
        return dict(Counter(each.owner for each in self.experiments.values() if each.state == "queued"))

    def read_events(self, *, after=0, experiment=None, limit=None):
        found = [e for e in self.events if e.seq > after and experiment in (None, e.experiment)]
        return found[:limit]

    def read_work(self, experiment):
        return self.works[experiment]

    def find_attempt(self, token):
        return self.fences.get(token)

    def add_artefacts(self, attempt, artefacts):
        id, number, names = attempt.experiment, attempt.number, {artefact.name for artefact in artefacts}
        gone = [
            key
            for key in self.artefacts
            if key[0] == id and (key[1] < number - 1 or (key[1] == number and key[2] in names))
        ]
        digests = {self.artefacts.pop(key).digest for key in gone}
        for artefact in artefacts:
            kept = dataclasses.replace(artefact, attempt=number, time_s=time.time())
            self.artefacts[id, number, artefact.name] = kept
        return digests - {artefact.digest for artefact in self.artefacts.values()}

    def read_artefacts(self, experiment):
        mine = [artefact for (id, *_), artefact in self.artefacts.items() if id == experiment]
        return sorted(mine, key=lambda artefact: (-artefact.attempt, artefact.name))

    def read_digests(self):
        code = {work.code.digest for work in self.works.values() if work.code}
        return code | {artefact.digest for artefact in self.artefacts.values()}

    def meet_node(self, node: Node):
        old = self.nodes.get(node.name)
        kept = {"n_bad": old.n_bad, "last_bad": old.last_bad} if old else {}
        self.nodes[node.name] = dataclasses.replace(node, seen_s=time.time(), **kept)
        return old is not None and old.boot != node.boot

    def read_nodes(self, name=None):
        return [self.nodes[each] for each in sorted(self.nodes) if name in (None, each)]

    def mark_node(self, name, *, n_bad, last_bad):
        self.nodes[name] = dataclasses.replace(self.nodes[name], n_bad=n_bad, last_bad=last_bad)

    def add_token(self, token, *, role, label, lasts_s, is_single_use):
        ends_s = None if lasts_s is None else time.time() + lasts_s
        self.tokens[token] = (Token(role=role, label=label), ends_s, is_single_use)

    def read_tokens(self):
        return [
            {"role": found.role, "label": found.label, "expires_s": ends_s}
            for found, ends_s, _ in self.tokens.values()
            if ends_s is None or ends_s > time.time()
        ]

    def find_token(self, token):
        found, ends_s, _ = self.tokens.get(token, (None, None, False))
        if found is None or (ends_s is not None and ends_s < time.time()):
            return None
        return found

    def use_up(self, token):
        _, _, is_single_use = self.tokens.get(token, (None, None, False))
        if is_single_use:
            del self.tokens[token]
        return is_single_use

    def remove_tokens(self, label):
        gone = [token for token, (found, *_) in self.tokens.items() if found.label == label]
        for token in gone:
            del self.tokens[token]
        return len(gone)
