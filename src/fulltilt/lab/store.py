"""Store sweeps, experiments, attempts and events in one SQLite database in the lab's folder.

Only ``Store.advance`` changes a state. In one transaction it updates the row, which must be in a state that allows the
transition and at the attempt that the caller knows, and adds a row to ``event``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, Table, Text, UniqueConstraint, event, exc

from fulltilt.errors import StorageError, UsageError
from fulltilt.lab.records import Attempt, Event, Experiment, Point
from fulltilt.lab.states import ARROWS

DATABASE = "lab.db"
BUSY_TIMEOUT_S = 60.0  # to wait for another process's transaction, which takes milliseconds
SETTINGS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",  # NORMAL may lose what was committed when the power fails
    "PRAGMA foreign_keys = ON",
)

TABLES = sa.MetaData()
SWEEP = Table(
    "sweep",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("source", Text, nullable=False, unique=True),  # the configuration file, an absolute path
    Column("created_s", Float, nullable=False),
)
EXPERIMENT = Table(
    "experiment",
    TABLES,
    Column("id", Integer, primary_key=True),
    Column("sweep", ForeignKey("sweep.name"), nullable=False),
    Column("digest", Text, nullable=False),
    Column("point", JSON, nullable=False),
    Column("overrides", JSON, nullable=False),
    Column("config", JSON, nullable=False),
    Column("priority", Integer, nullable=False, default=0),
    Column("state", Text, nullable=False, default="queued", index=True),
    Column("attempt", Integer, nullable=False, default=0),
    Column("created_s", Float, nullable=False),
    UniqueConstraint("sweep", "digest"),
)
ATTEMPT = Table(
    "attempt",
    TABLES,
    Column("experiment", ForeignKey("experiment.id"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("node", Text, nullable=False),
    Column("devices", JSON, nullable=False),
    Column("n_threads", Integer),
    Column("pid", Integer),
    Column("started_s", Float, nullable=False),
    Column("ended_s", Float),
    Column("outcome", Text),
    Column("reason", Text),
    Column("metrics", JSON),
)
EVENT = Table(
    "event",
    TABLES,
    Column("seq", Integer, primary_key=True),
    Column("experiment", ForeignKey("experiment.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("arrow", Text, nullable=False),
    Column("state", Text, nullable=False),  # that it led to
    Column("time_s", Float, nullable=False),
)


class StaleAttemptError(Exception):
    """The experiment's state or attempt has changed since the caller read it."""


class Store:
    """The database of one lab. Any number of processes may open it; only one schedules."""

    def __init__(self, engine: sa.Engine):
        self._engine = engine

    def close(self) -> None:
        self._engine.dispose()

    def add(self, source: Path, points: Sequence[Point], overrides: Sequence[str]) -> int:
        """Queue the points that are not stored yet, in one transaction, and return their number."""
        with self._begin() as connection:
            sweep = _find_or_add_sweep(connection, source)
            known = set(connection.execute(sa.select(EXPERIMENT.c.digest).where(EXPERIMENT.c.sweep == sweep)).scalars())
            last = connection.execute(sa.select(sa.func.max(EXPERIMENT.c.id))).scalar() or 0
            same = {"sweep": sweep, "overrides": list(overrides), "created_s": time.time()}
            rows = [
                {**same, "digest": point.digest, "point": point.values, "config": point.config}
                for point in points
                if point.digest not in known
            ]
            if rows:
                connection.execute(sa.insert(EXPERIMENT), rows)
            new = connection.execute(sa.select(EXPERIMENT.c.id).where(EXPERIMENT.c.id > last)).scalars().all()
            if new:
                connection.execute(sa.insert(EVENT), [_build_event(number, 0, "submit", "queued") for number in new])
        return len(new)

    def lease(self, experiment: Experiment, *, node: str, devices: Sequence[str], n_threads: int | None) -> Attempt:
        """Begin the next attempt of a queued experiment. Raises StaleAttemptError if it is not queued any more."""
        number = experiment.attempt + 1
        with self._begin() as connection:
            _advance(connection, "lease", experiment.newest, attempt=number)
            row = {"experiment": _number(experiment.id), "number": number, "node": node, "devices": list(devices)}
            connection.execute(sa.insert(ATTEMPT), row | {"n_threads": n_threads, "started_s": time.time()})
        return Attempt(experiment=experiment.id, number=number)

    def advance(self, arrow: str, attempt: Attempt, **values: Any) -> None:
        """Take one transition of ``states.ARROWS`` and store ``values`` in the row of the attempt.

        Raises:
            StaleAttemptError: the experiment is in a state that forbids the transition, or at another attempt.
        """
        with self._begin() as connection:
            _advance(connection, arrow, attempt)
            if values:
                at = (ATTEMPT.c.experiment == _number(attempt.experiment), ATTEMPT.c.number == attempt.number)
                connection.execute(sa.update(ATTEMPT).where(*at).values(**values))

    def read_experiments(
        self, *, states: Collection[str] | None = None, id: str | None = None, limit: int | None = None
    ) -> tuple[Experiment, ...]:
        """Return experiments, oldest first; with ``states`` only those in them, highest priority first."""
        at = (ATTEMPT.c.experiment == EXPERIMENT.c.id) & (ATTEMPT.c.number == EXPERIMENT.c.attempt)
        wanted = [column for column in EXPERIMENT.c if column.name not in ("digest", "config", "created_s")]
        newest = [ATTEMPT.c[name] for name in _OF_ATTEMPT]
        query = sa.select(*wanted, *newest).select_from(EXPERIMENT.outerjoin(ATTEMPT, at))
        if id is not None:
            query = query.where(EXPERIMENT.c.id == _number(id))
        if states is not None:
            query = query.where(EXPERIMENT.c.state.in_(states)).order_by(EXPERIMENT.c.priority.desc())
        with self._begin(is_reader=True) as connection:
            return tuple(map(_build_experiment, connection.execute(query.order_by(EXPERIMENT.c.id).limit(limit))))

    def read_ids(self, source: Path, digests: Collection[str]) -> dict[str, str]:
        """Return the ids of stored points of a file: digest → id."""
        query = sa.select(EXPERIMENT.c.digest, EXPERIMENT.c.id).join(SWEEP).where(SWEEP.c.source == str(source))
        with self._begin(is_reader=True) as connection:
            return {row.digest: f"e{row.id}" for row in connection.execute(query) if row.digest in digests}

    def read_work(self, experiment: str) -> tuple[Path, Mapping[str, Any]]:
        """Return the file that an experiment was submitted from, and all its values."""
        query = sa.select(SWEEP.c.source, EXPERIMENT.c.config).join(SWEEP)
        with self._begin(is_reader=True) as connection:
            row = connection.execute(query.where(EXPERIMENT.c.id == _number(experiment))).one()
        return Path(row.source), row.config

    def read_events(self, *, after: int = 0) -> list[Event]:
        """Return the events after number ``after``, in order."""
        query = sa.select(EVENT).where(EVENT.c.seq > after).order_by(EVENT.c.seq)
        with self._begin(is_reader=True) as connection:
            return [
                Event(**{**row, "experiment": f"e{row['experiment']}"}) for row in connection.execute(query).mappings()
            ]

    @contextlib.contextmanager
    def _begin(self, *, is_reader: bool = False) -> Iterator[sa.Connection]:
        engine = self._engine.execution_options(is_reader=is_reader)
        with _storage_errors(engine), engine.begin() as connection:
            yield connection


def open_store(lab: Path, *, create: bool = False) -> Store:
    """Open the queue in a lab's folder.

    Raises:
        UsageError: the folder holds no queue.
        StorageError: its file cannot be read or written, or is no database.
    """
    path = lab / DATABASE
    if not create and not path.is_file():
        raise UsageError(f"there is no lab in {lab}; fulltilt lab submit --local CONFIG makes one, --lab names another")
    engine = sa.create_engine(f"sqlite:///{path}", connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _set_up_connection)
    event.listen(engine, "begin", _begin)
    with _storage_errors(engine):
        TABLES.create_all(engine)
    return Store(engine)


_OF_DEVICE = ("node", "devices", "n_threads", "pid", "started_s", "ended_s")
_OF_ATTEMPT = (*_OF_DEVICE, "outcome", "reason", "metrics")


def _advance(connection: sa.Connection, name: str, at: Attempt, **values: Any) -> None:
    arrow, number = ARROWS[name], _number(at.experiment)
    guard = (EXPERIMENT.c.state.in_(arrow.sources), EXPERIMENT.c.attempt == at.number)
    done = connection.execute(
        sa.update(EXPERIMENT).where(EXPERIMENT.c.id == number, *guard).values(state=arrow.target, **values)
    )
    if done.rowcount != 1:
        raise StaleAttemptError(f"{at.experiment} is not {' or '.join(arrow.sources)} at attempt {at.number}")
    row = _build_event(number, values.get("attempt", at.number), name, arrow.target)
    connection.execute(sa.insert(EVENT), row)


def _build_event(number: int, attempt: int, arrow: str, state: str) -> dict[str, Any]:
    return {"experiment": number, "attempt": attempt, "arrow": arrow, "state": state, "time_s": time.time()}


def _find_or_add_sweep(connection: sa.Connection, source: Path) -> str:
    """Return the sweep of a file, named after it; a number is added if another file has that name."""
    found = connection.execute(sa.select(SWEEP.c.name).where(SWEEP.c.source == str(source))).scalar()
    if found is not None:
        return found
    taken = set(connection.execute(sa.select(SWEEP.c.name)).scalars())
    numbered = (f"{source.stem}-{number}" for number in range(2, len(taken) + 3))
    name = next(name for name in (source.stem, *numbered) if name not in taken)
    connection.execute(sa.insert(SWEEP), {"name": name, "source": str(source), "created_s": time.time()})
    return name


def _build_experiment(row: Any) -> Experiment:
    left_out = _OF_DEVICE if row.state == "queued" else ()  # it holds none while it waits
    values = {name: value for name, value in row._mapping.items() if value is not None and name not in left_out}
    return Experiment(**{**values, "id": f"e{row.id}"})


def _number(experiment: str) -> int:
    return int(experiment.removeprefix("e"))


def _set_up_connection(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where _begin says, and not at the driver's discretion
    for setting in SETTINGS:
        connection.execute(setting)


def _begin(connection: sa.Connection) -> None:
    """Begin a transaction; writers lock first, since SQLite refuses a reader that turns into a writer."""
    is_reader = connection.get_execution_options().get("is_reader")
    connection.exec_driver_sql("BEGIN" if is_reader else "BEGIN IMMEDIATE")


@contextlib.contextmanager
def _storage_errors(engine: sa.Engine) -> Iterator[None]:
    try:
        yield
    except exc.DatabaseError as error:
        place, said = engine.url.database, str(error.orig)
        if "full" in said:
            raise StorageError(f"no space left for {place}; free some and try again") from error
        if "not a database" in said or "malformed" in said:
            raise StorageError(
                f"{place} is no lab of fulltilt ({said}); move it away, or name another --lab"
            ) from error
        raise StorageError(
            f"{place} cannot be used ({said}); see that its folder can be written and its disk has room, or name "
            "another --lab"
        ) from error
