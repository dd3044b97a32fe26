"""Read and change the records of a lab.

Only ``lease_all`` and ``advance`` change a state. In one transaction they update the row, which must be in a state that
allows the transition and at the attempt that the caller knows, and add a row to ``event``.
"""

import contextlib
import dataclasses
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from fulltilt.errors import StorageError
from fulltilt.lab.records import Artefact, Attempt, Code, Event, Experiment, Node, Point, Token, Work
from fulltilt.lab.states import ARROWS
from fulltilt.lab.store.tables import ARTEFACT, ATTEMPT, EVENT, EXPERIMENT, NODE, SWEEP, TOKEN

if TYPE_CHECKING:
    from fulltilt.lab.store.opening import Ballast

MOST_KNOWN = 10_000  # tokens of runners in memory
MOST_AT_ONCE = 64  # changes in one transaction
ROWS_AT_ONCE = 1000  # of an insert; SQLite takes 32,766 values


class StaleAttemptError(Exception):
    """The experiment's state or attempt has changed since the caller read it."""


class Store:
    """The database of one lab. One process writes to it; its threads take turns.

    Args:
        explain: Turns errors of the database into ours.
        ballast: Room for changes of state when the disk is full; None where the database has a disk of its own.
    """

    def __init__(
        self,
        engine: sa.Engine,
        *,
        explain: Callable[[], contextlib.AbstractContextManager[None]],
        ballast: "Ballast | None" = None,
        on_close: Callable[[], None] | None = None,
    ):
        self._engine, self._explain, self._ballast, self._on_close = engine, explain, ballast, on_close
        self.known: dict[str, Attempt] = {}  # by token
        self._turn = threading.Lock()  # fair enough; SQLite's own waiting lets a writer starve for seconds
        self._count, self._n_waiting = threading.Lock(), 0
        self._batch: _Batch | None = None

    def close(self) -> None:
        if self._on_close is not None:
            self._on_close()
        self._engine.dispose()

    def has_room(self) -> bool:
        """Return whether more than changes of state can be written; False while the disk is full."""
        return self._ballast is None or self._ballast.restore()

    # What is to be done

    def add(
        self,
        source: Path | str,
        points: Sequence[Point],
        overrides: Sequence[str],
        *,
        owner: str = "",
        priority: int = 0,
        n_devices: int = 1,
        code: Code | None = None,
    ) -> int:
        """Queue the points that are not stored yet, in one transaction, and return their number."""
        with self._write() as connection:
            sweep = _find_or_add_sweep(connection, str(source))
            known = set(connection.execute(sa.select(EXPERIMENT.c.digest).where(EXPERIMENT.c.sweep == sweep)).scalars())
            last = connection.execute(sa.select(sa.func.max(EXPERIMENT.c.id))).scalar() or 0
            same = {"sweep": sweep, "overrides": list(overrides), "created_s": time.time(), "owner": owner}
            same |= {"priority": priority, "n_devices": n_devices}
            same |= {"code": code and dataclasses.asdict(code)}
            rows = [
                {**same, "digest": point.digest, "point": point.values, "config": point.config}
                for point in points
                if point.digest not in known
            ]
            if connection.dialect.name == "sqlite":  # it would give the numbers of removed ones again
                rows = [{**row, "id": id} for id, row in enumerate(rows, max(last, _read_removed(connection)) + 1)]
            for start in range(0, len(rows), ROWS_AT_ONCE):
                connection.execute(sa.insert(EXPERIMENT), rows[start : start + ROWS_AT_ONCE])
            event = _build_event(0, 0, "submit", "queued")
            told = {key: sa.literal(value) for key, value in event.items()} | {"experiment": EXPERIMENT.c.id}
            new = sa.select(*told.values()).where(EXPERIMENT.c.id > last).order_by(EXPERIMENT.c.id)
            connection.execute(sa.insert(EVENT).from_select(list(told), new))
        return len(rows)

    def retry(
        self, source: str, points: Sequence[Point], overrides: Sequence[str], *, n_devices: int, code: Code | None
    ) -> int:
        """Queue those of the points again that failed or were cancelled, in one transaction, and return their number.

        They run what is given here, and not what they were submitted with: the mistake may have been in that.
        """
        given = {point.digest: point for point in points}
        sent = {"overrides": list(overrides), "n_devices": n_devices, "code": code and dataclasses.asdict(code)}
        query = sa.select(EXPERIMENT.c.id, EXPERIMENT.c.attempt, EXPERIMENT.c.digest).join(SWEEP)
        query = query.where(SWEEP.c.source == source, EXPERIMENT.c.state.in_(ARROWS["retry"].sources))
        with self._write() as connection:
            rows = [row for row in connection.execute(query) if row.digest in given]
            for row in rows:
                at = Attempt(experiment=f"e{row.id}", number=row.attempt)
                _advance(connection, "retry", at, **sent, config=given[row.digest].config, delay_s=None, n_lost=0)
        return len(rows)

    def lease_all(self, wanted: Sequence[tuple[Experiment, dict[str, Any]]]) -> list[tuple[Attempt, str] | None]:
        """Begin the next attempts of queued experiments, in one transaction.

        Args:
            wanted: Each with node, devices, n_threads and engine of its attempt.

        Returns:
            The attempts, and the tokens that their runners show; None for what is not queued any more.
        """
        with self._write() as connection:
            found = [_lease(connection, experiment, place) for experiment, place in wanted]
        for attempt, token in filter(None, found):
            self.remember(token, attempt)
        return found

    def remember(self, token: str, attempt: Attempt) -> None:
        """Keep in memory whose token that is, which never changes; whether the attempt is over is another question."""
        if len(self.known) >= MOST_KNOWN:
            self.known.clear()
        self.known[token] = attempt

    def advance(
        self,
        arrow: str,
        attempt: Attempt,
        *,
        then: str | None = None,
        delay_s: float | None = None,
        n_lost: int | None = None,
        **noted: Any,
    ) -> None:
        """Take one transition of ``states.ARROWS``.

        Args:
            then: Another one, in the same transaction.
            delay_s: How long to wait in backoff.
            n_lost: Ends in a row that were not the experiment's fault; None leaves the number as it is.
            noted: Columns of the attempt's row.

        Raises:
            StaleAttemptError: the experiment is in a state that forbids the transition, or at another attempt.
        """
        with self._write() as connection:
            changed: dict[str, Any] = {"delay_s": delay_s} | ({} if n_lost is None else {"n_lost": n_lost})
            _advance(connection, arrow, attempt, **changed)
            if noted:
                _note(connection, attempt, noted)
            if then is not None:
                _advance(connection, then, attempt)

    def note(self, attempt: Attempt, **noted: Any) -> None:
        """Store values in the row of an attempt, whatever its state."""
        with self._write() as connection:
            _note(connection, attempt, noted)

    def set_priority(self, experiment: str, priority: int) -> None:
        with self._write() as connection:
            at = EXPERIMENT.c.id == parse_id(experiment)
            connection.execute(sa.update(EXPERIMENT).where(at).values(priority=priority))

    def remove(self, experiment: Experiment) -> None:
        """Remove an experiment that is over, with its history. Raises StaleAttemptError if it runs again."""
        number = parse_id(experiment.id)
        with self._write() as connection:
            for table in (EVENT, ATTEMPT, ARTEFACT):
                connection.execute(sa.delete(table).where(table.c.experiment == number))
            if connection.dialect.name == "sqlite":
                connection.exec_driver_sql(f"PRAGMA user_version = {max(number, _read_removed(connection))}")
            at = (EXPERIMENT.c.id == number, EXPERIMENT.c.state == experiment.state)
            if connection.execute(sa.delete(EXPERIMENT).where(*at)).rowcount != 1:
                raise StaleAttemptError(f"{experiment.id} is not {experiment.state} any more")

    # What there is

    def read_experiments(
        self,
        *,
        states: Collection[str] | None = None,
        id: str | None = None,
        owner: str | None = None,
        sweep: str | None = None,
        unchanged_since_s: float | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> tuple[Experiment, ...]:
        """Return experiments, oldest first; with ``states`` only those in them, highest priority first."""
        if id is not None:
            with self._read() as connection:
                return tuple(map(_build_experiment, connection.execute(_ONE, {"at": parse_id(id)})))
        query = sa.select(EXPERIMENT.c.id)
        if unchanged_since_s is not None:  # Unix time
            old = sa.select(EVENT.c.experiment).group_by(EVENT.c.experiment)
            query = query.where(EXPERIMENT.c.id.in_(old.having(sa.func.max(EVENT.c.time_s) < unchanged_since_s)))
        for column, wanted in ((EXPERIMENT.c.owner, owner), (EXPERIMENT.c.sweep, sweep)):
            if wanted is not None:
                query = query.where(column == wanted)
        order = [EXPERIMENT.c.id]
        if states is not None:
            query, order = query.where(EXPERIMENT.c.state.in_(states)), [EXPERIMENT.c.priority.desc(), *order]
        page = query.order_by(*order).limit(limit).offset(offset)  # of numbers: what is skipped is not read
        with self._read() as connection:
            query = _EXPERIMENTS.where(EXPERIMENT.c.id.in_(page)).order_by(*order)
            return tuple(map(_build_experiment, connection.execute(query)))

    def read_heads(self, limit: int) -> list[Experiment]:
        """Return the first ``limit`` queued experiments of each owner, in no particular order."""
        with self._read() as connection:
            at = EXPERIMENT.c.state == "queued"
            owners = connection.execute(sa.select(EXPERIMENT.c.owner).where(at).distinct()).scalars().all()
        return [
            found for owner in owners for found in self.read_experiments(states=("queued",), owner=owner, limit=limit)
        ]

    def read_newest(self, states: Collection[str], limit: int) -> tuple[Experiment, ...]:
        """Return the experiments in these states that changed last, the newest first."""
        last: list[tuple[int, int]] = []
        with self._read() as connection:
            for state in states:  # one after the other, each along its index until the limit
                last += map(tuple, connection.execute(_LAST, {"state": state, "limit": limit}))
            ids = [id for _, id in sorted(last, reverse=True)[:limit]]
            found = {row.id: row for row in connection.execute(_EXPERIMENTS.where(EXPERIMENT.c.id.in_(ids)))}
        return tuple(_build_experiment(found[id]) for id in ids if id in found and found[id].state in states)

    def read_urgent(self, states: Sequence[str], limit: int) -> list[Experiment]:
        """Return the first ``limit`` experiments, those in the first of ``states`` before those in the next."""
        found: list[Experiment] = []
        for state in states:
            if len(found) < limit:
                found += self.read_experiments(states=(state,), limit=limit - len(found))
        return found

    def count_states(self, *, sweep: str | None = None) -> dict[str, int]:
        query = sa.select(EXPERIMENT.c.state, sa.func.count()).group_by(EXPERIMENT.c.state)
        if sweep is not None:
            query = query.where(EXPERIMENT.c.sweep == sweep)
        with self._read() as connection:
            return {row[0]: row[1] for row in connection.execute(query)}

    def count_queued(self) -> dict[str, int]:
        """Return how many experiments of each owner are queued."""
        query = sa.select(EXPERIMENT.c.owner, sa.func.count()).where(EXPERIMENT.c.state == "queued")
        with self._read() as connection:
            return {row[0]: row[1] for row in connection.execute(query.group_by(EXPERIMENT.c.owner))}

    def read_ids(self, source: Path | str, digests: Collection[str]) -> dict[str, str]:
        """Return the ids of stored points of a file: digest → id."""
        query = sa.select(EXPERIMENT.c.digest, EXPERIMENT.c.id).join(SWEEP).where(SWEEP.c.source == str(source))
        with self._read() as connection:
            return {row.digest: f"e{row.id}" for row in connection.execute(query) if row.digest in digests}

    def read_work(self, experiment: str) -> Work:
        """Return what an attempt at the experiment has to do."""
        with self._read() as connection:
            row = connection.execute(_WORK, {"at": parse_id(experiment)}).one()
        return Work(source=Path(row.source), config=row.config, code=row.code and Code(**row.code))

    def read_last_event(self) -> int:
        """Return the number of the newest event; 0: there is none."""
        with self._read() as connection:
            return connection.scalar(sa.select(sa.func.max(EVENT.c.seq))) or 0

    def read_events(self, *, after: int = 0, experiment: str | None = None, limit: int | None = None) -> list[Event]:
        """Return the events after number ``after``, in order."""
        query = sa.select(EVENT).where(EVENT.c.seq > after).order_by(EVENT.c.seq).limit(limit)
        if experiment is not None:
            query = query.where(EVENT.c.experiment == parse_id(experiment))
        with self._read() as connection:
            return [
                Event(**{**row, "experiment": f"e{row['experiment']}"}) for row in connection.execute(query).mappings()
            ]

    def read_attempts(self, experiment: str) -> list[dict[str, Any]]:
        """Return the rows of all attempts at an experiment, without their fences."""
        wanted = [column for column in ATTEMPT.c if column.name != "fence"]
        query = sa.select(*wanted).where(ATTEMPT.c.experiment == parse_id(experiment)).order_by(ATTEMPT.c.number)
        with self._read() as connection:
            return [dict(row) for row in connection.execute(query).mappings()]

    def find_attempt(self, token: str) -> Attempt | None:
        """Return the attempt whose runner holds this token, old ones too; None: nobody's."""
        with self._read() as connection:
            row = connection.execute(_FENCED, {"fence": compute_digest(token)}).one_or_none()
        return None if row is None else Attempt(experiment=f"e{row.experiment}", number=row.number)

    # Files in the depot

    def add_artefacts(self, attempt: Attempt, artefacts: Sequence[Artefact]) -> set[str]:
        """Store the names of files of an attempt → digests that nothing refers to any more.

        The newest file of a name counts, and of earlier attempts those of the last one.
        """
        number = parse_id(attempt.experiment)
        same = {"experiment": number, "attempt": attempt.number, "time_s": time.time()}
        rows = [{**same, "name": it.name, "digest": it.digest, "n_bytes": it.n_bytes} for it in artefacts]
        mine, is_old = ARTEFACT.c.experiment == number, ARTEFACT.c.attempt < attempt.number - 1
        replaced = (ARTEFACT.c.attempt == attempt.number) & ARTEFACT.c.name.in_([it.name for it in artefacts])
        with self._write() as connection:
            gone = sa.select(ARTEFACT.c.digest).where(mine, is_old | replaced)
            digests = set(connection.execute(gone).scalars())
            connection.execute(sa.delete(ARTEFACT).where(mine, is_old | replaced))
            if rows:
                connection.execute(sa.insert(ARTEFACT), rows)
            held = connection.execute(sa.select(ARTEFACT.c.digest).where(ARTEFACT.c.digest.in_(digests))).scalars()
            return digests - set(held)

    def read_artefacts(self, experiment: str) -> list[Artefact]:
        """Return the files of all attempts, those of the newest attempt first."""
        with self._read() as connection:
            return [Artefact(**row) for row in connection.execute(_FILES, {"at": parse_id(experiment)}).mappings()]

    def read_digests(self) -> set[str]:
        """Return the digests of all files that something refers to: those of attempts, and code."""
        code = EXPERIMENT.c.code["digest"].as_string()
        with self._read() as connection:
            files = connection.scalars(sa.select(ARTEFACT.c.digest).distinct())
            return {*files, *connection.scalars(sa.select(code).where(code.is_not(None)).distinct())}

    # Nodes and tokens

    def meet_node(self, node: Node) -> bool:
        """Store what a node said of itself; return whether it has started again since it was last seen."""
        row = {"boot": node.boot, "versions": dict(node.versions), "devices": list(node.devices)}
        row |= {"seen_s": time.time()}
        with self._write() as connection:
            old = connection.execute(sa.select(NODE.c.boot).where(NODE.c.name == node.name)).scalar()
            if old is None:
                connection.execute(sa.insert(NODE), row | {"name": node.name})
            else:
                connection.execute(sa.update(NODE).where(NODE.c.name == node.name).values(**row))
        return old is not None and old != node.boot

    def read_nodes(self, name: str | None = None) -> list[Node]:
        """Return all nodes, or the one of this name if there is one."""
        query, given = (_NODES, {}) if name is None else (_NODE, {"at": name})
        with self._read() as connection:
            rows = connection.execute(query, given).mappings()
            return [Node(**{**row, "last_bad": row["last_bad"] and f"e{row['last_bad']}"}) for row in rows]

    def mark_node(self, name: str, *, n_bad: int, last_bad: str | None) -> None:
        """Store how many bad ends in a row a node had, and of which experiment the last one was."""
        with self._write() as connection:
            values = {"n_bad": n_bad, "last_bad": last_bad and parse_id(last_bad)}
            connection.execute(sa.update(NODE).where(NODE.c.name == name).values(**values))

    def add_token(self, token: str, *, role: str, label: str, lasts_s: float | None, is_single_use: bool) -> None:
        row = {"digest": compute_digest(token), "role": role, "label": label, "created_s": time.time()}
        row |= {"expires_s": lasts_s and time.time() + lasts_s, "is_single_use": int(is_single_use)}
        with self._write() as connection:
            connection.execute(sa.delete(TOKEN).where(TOKEN.c.expires_s < time.time()))
            connection.execute(sa.insert(TOKEN), row)

    def find_token(self, token: str) -> Token | None:
        """Return what a token allows; None: it is unknown or has expired."""
        at = TOKEN.c.digest == compute_digest(token)
        with self._read() as connection:
            row = connection.execute(sa.select(TOKEN).where(at)).one_or_none()
        if row is None or (row.expires_s is not None and row.expires_s < time.time()):
            return None
        return Token(role=row.role, label=row.label)

    def use_up(self, token: str) -> bool:
        """Remove a token for single use; return whether it was there, which of several at once one is told."""
        at = (TOKEN.c.digest == compute_digest(token), TOKEN.c.is_single_use == 1)
        with self._write() as connection:
            return connection.execute(sa.delete(TOKEN).where(*at)).rowcount == 1

    def read_tokens(self) -> list[dict[str, Any]]:
        """Return role, label and times of the tokens that have not expired, oldest first."""
        wanted = (TOKEN.c.role, TOKEN.c.label, TOKEN.c.created_s, TOKEN.c.expires_s)
        is_good = TOKEN.c.expires_s.is_(None) | (TOKEN.c.expires_s > time.time())
        with self._read() as connection:
            rows = connection.execute(sa.select(*wanted).where(is_good).order_by(TOKEN.c.created_s)).mappings()
            return [dict(row) for row in rows]

    def remove_tokens(self, label: str) -> int:
        with self._write() as connection:
            return connection.execute(sa.delete(TOKEN).where(TOKEN.c.label == label)).rowcount

    @contextlib.contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        with self._explain(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def _write(self) -> Iterator[sa.Connection]:
        """Take part in a transaction that is committed, and synced, before the block is left.

        Threads that write at the same time share one: each has its own savepoint, and the last one commits for all.
        """
        with self._count:
            self._n_waiting += 1
        with self._turn:
            with self._count:
                self._n_waiting -= 1
            batch = self._batch = self._batch or _Batch(self._engine, self._explain)
            try:
                with self._explain(), _savepoint(batch.connection):
                    yield batch.connection
            except StorageError as error:  # SQLite may have rolled back all of it
                self._batch = None
                batch.fail(error)
                self._give_room()
                raise
            finally:
                batch.n += 1
                if self._batch is batch and (not self._n_waiting or batch.n >= MOST_AT_ONCE):
                    self._batch = None
                    batch.commit()
        try:
            batch.wait()
        except StorageError:  # a full disk is found out when the pages are written
            self._give_room()
            raise

    def _give_room(self) -> None:
        """Let the next change of state find room."""
        if self._ballast is not None:
            self._ballast.release()


@contextlib.contextmanager
def _savepoint(connection: sa.Connection) -> Iterator[None]:
    connection.exec_driver_sql("SAVEPOINT own")
    try:
        yield
    except BaseException:
        with contextlib.suppress(SQLAlchemyError):  # SQLite rolled back all of it: the first error says why
            connection.exec_driver_sql("ROLLBACK TO own")
            connection.exec_driver_sql("RELEASE own")
        raise
    connection.exec_driver_sql("RELEASE own")


class _Batch:
    """A transaction that several threads share."""

    def __init__(self, engine: sa.Engine, explain: Callable[[], contextlib.AbstractContextManager[None]]):
        self._explain, self.n = explain, 0
        self._is_over = threading.Event()
        self._error: StorageError | None = None
        with explain():
            self.connection = engine.connect()
            self._transaction = self.connection.begin()
            begin(self.connection)

    def commit(self) -> None:
        try:
            with self._explain():
                self._transaction.commit()
        except StorageError as error:
            self._error = error
        finally:
            self.connection.close()
            self._is_over.set()

    def fail(self, error: StorageError) -> None:
        self._error = error
        with contextlib.suppress(SQLAlchemyError):
            self._transaction.rollback()
        self.connection.close()
        self._is_over.set()

    def wait(self) -> None:
        """Wait until all is committed. Raises StorageError where it was not: nothing of it is stored then."""
        self._is_over.wait()
        if self._error is not None:
            raise StorageError(str(self._error)) from self._error


def begin(connection: sa.Connection) -> None:
    """Begin a writer's transaction; a reader's statement is one by itself.

    SQLite refuses a reader that turns into a writer, so a writer locks first. An event of the engine would do that
    too, and cost every statement a quarter of its time.
    """
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def _read_removed(connection: sa.Connection) -> int:
    """Return the highest number of an experiment that was removed: a word that SQLite keeps for its users."""
    return connection.exec_driver_sql("PRAGMA user_version").scalar() or 0


def compute_digest(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def parse_id(experiment: str) -> int:
    """Return the number of ``e12``."""
    return int(experiment.removeprefix("e"))


_OF_DEVICE = ("node", "devices", "n_threads", "pid", "started_s", "ended_s", "engine", "ref", "fence")
_OF_ATTEMPT = (*_OF_DEVICE, "outcome", "reason", "metrics")
_UNTOLD = ("digest", "config", "created_s", "code")


_IS_NEWEST = (ATTEMPT.c.experiment == EXPERIMENT.c.id) & (ATTEMPT.c.number == EXPERIMENT.c.attempt)

# What every call of a runner executes is built once: building a statement takes several times as long as executing it.
_AT, _NUMBER = sa.bindparam("at"), sa.bindparam("at_number")
_EXPERIMENTS = sa.select(
    *(column for column in EXPERIMENT.c if column.name not in _UNTOLD), *(ATTEMPT.c[name] for name in _OF_ATTEMPT)
).select_from(EXPERIMENT.outerjoin(ATTEMPT, _IS_NEWEST))
_ONE = _EXPERIMENTS.where(EXPERIMENT.c.id == _AT)
_LATER = EVENT.alias()
_LAST = (  # what led to a state, newest first, where nothing came after it
    sa.select(EVENT.c.seq, EVENT.c.experiment)
    .where(EVENT.c.state == sa.bindparam("state"))
    .where(~sa.exists().where(_LATER.c.experiment == EVENT.c.experiment, _LATER.c.seq > EVENT.c.seq))
    .order_by(EVENT.c.seq.desc())
    .limit(sa.bindparam("limit", type_=sa.Integer))
)
_WORK = sa.select(SWEEP.c.source, EXPERIMENT.c.config, EXPERIMENT.c.code).join(SWEEP).where(EXPERIMENT.c.id == _AT)
_FENCED = sa.select(ATTEMPT.c.experiment, ATTEMPT.c.number).where(ATTEMPT.c.fence == sa.bindparam("fence"))
_OF_FILE = (ARTEFACT.c.attempt, ARTEFACT.c.name, ARTEFACT.c.digest, ARTEFACT.c.n_bytes, ARTEFACT.c.time_s)
_FILES = sa.select(*_OF_FILE).where(ARTEFACT.c.experiment == _AT).order_by(ARTEFACT.c.attempt.desc(), ARTEFACT.c.name)
_NODES = sa.select(NODE).order_by(NODE.c.name)
_NODE = _NODES.where(NODE.c.name == _AT)
_NOTE = sa.update(ATTEMPT).where(ATTEMPT.c.experiment == _AT, ATTEMPT.c.number == _NUMBER)
_MOVES = {
    name: sa.update(EXPERIMENT).where(
        EXPERIMENT.c.id == _AT,
        EXPERIMENT.c.attempt == _NUMBER,
        sa.or_(*(EXPERIMENT.c.state == state for state in arrow.sources)),
    )
    for name, arrow in ARROWS.items()
}
_NEW_ATTEMPT, _NEW_EVENT = sa.insert(ATTEMPT), sa.insert(EVENT)


def _lease(connection: sa.Connection, experiment: Experiment, place: dict[str, Any]) -> tuple[Attempt, str] | None:
    number, token = experiment.attempt + 1, secrets.token_urlsafe(16)
    try:
        _advance(connection, "lease", experiment.newest, attempt=number)
    except StaleAttemptError:
        return None
    row = {"experiment": parse_id(experiment.id), "number": number, "started_s": time.time()}
    row |= {**place, "devices": list(place["devices"]), "fence": compute_digest(token)}
    connection.execute(_NEW_ATTEMPT, row)
    return Attempt(experiment=experiment.id, number=number), token


def _advance(connection: sa.Connection, name: str, at: Attempt, **values: Any) -> None:
    arrow, number = ARROWS[name], parse_id(at.experiment)
    values |= {"state": arrow.target, "wish": arrow.wish, "at": number, "at_number": at.number}
    if connection.execute(_MOVES[name], values).rowcount != 1:
        raise StaleAttemptError(f"{at.experiment} is not {' or '.join(arrow.sources)} at attempt {at.number}")
    connection.execute(_NEW_EVENT, _build_event(number, values.get("attempt", at.number), name, arrow.target))


def _note(connection: sa.Connection, attempt: Attempt, values: Mapping[str, Any]) -> None:
    connection.execute(_NOTE, {**values, "at": parse_id(attempt.experiment), "at_number": attempt.number})


def _build_event(number: int, attempt: int, arrow: str, state: str) -> dict[str, Any]:
    return {"experiment": number, "attempt": attempt, "arrow": arrow, "state": state, "time_s": time.time()}


def _find_or_add_sweep(connection: sa.Connection, source: str) -> str:
    """Return the sweep of a file, named after it; a number is added if another file has that name."""
    found = connection.execute(sa.select(SWEEP.c.name).where(SWEEP.c.source == source)).scalar()
    if found is not None:
        return found
    taken, stem = set(connection.execute(sa.select(SWEEP.c.name)).scalars()), Path(source).stem
    numbered = (f"{stem}-{number}" for number in range(2, len(taken) + 3))
    name = next(name for name in (stem, *numbered) if name not in taken)
    connection.execute(sa.insert(SWEEP), {"name": name, "source": source, "created_s": time.time()})
    return name


def _build_experiment(row: Any) -> Experiment:
    left_out = _OF_DEVICE if row.state == "queued" else ()  # it holds none while it waits
    values = {name: value for name, value in row._mapping.items() if value is not None and name not in left_out}
    return Experiment(**{**values, "id": f"e{row.id}", "last_node": row.node})
