"""Define the tables of a lab, as its newest migration leaves them."""

import sqlalchemy as sa
from sqlalchemy import JSON, Column, Float, ForeignKey, Index, Integer, Table, Text, UniqueConstraint, text

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
    Column("state", Text, nullable=False, default="queued"),
    Column("attempt", Integer, nullable=False, default=0),
    Column("created_s", Float, nullable=False),
    Column("owner", Text, nullable=False, server_default=""),  # who submitted it
    Column("n_devices", Integer, nullable=False, server_default=text("1")),
    Column("code", JSON(none_as_null=True)),  # the code it was submitted with: digest, root, entry
    Column("wish", Text),  # what somebody wants of its attempt: cancel, pause
    Column("delay_s", Float),  # to wait in backoff
    Column("n_lost", Integer, nullable=False, server_default=text("0")),  # ends in a row that were not its own fault
    UniqueConstraint("sweep", "digest"),
    Index("ix_experiment_queue", "state", "owner", text("priority DESC"), "id"),
    Index("ix_experiment_sweep", "sweep", "state", text("priority DESC"), "id"),  # each costs every change of state
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
    Column("fence", Text),  # digest of the token that its runner holds
    Column("engine", Text),
    Column("ref", Text),  # what the engine calls it
    Index("ix_attempt_fence", "fence", unique=True),
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
    Index("ix_event_experiment", "experiment"),
    Index("ix_event_state", "state", "seq"),
)
ARTEFACT = Table(  # files of attempts that lie in the depot
    "artefact",
    TABLES,
    Column("experiment", ForeignKey("experiment.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("digest", Text, nullable=False),
    Column("n_bytes", sa.BigInteger, nullable=False),
    Column("time_s", Float, nullable=False),
)
NODE = Table(
    "node",
    TABLES,
    Column("name", Text, primary_key=True),
    Column("boot", Text, nullable=False),  # changes when the machine starts again
    Column("versions", JSON, nullable=False),
    Column("devices", JSON, nullable=False),
    Column("seen_s", Float, nullable=False),
    Column("n_bad", Integer, nullable=False, server_default=text("0")),  # bad ends in a row, of different experiments
    Column("last_bad", Integer),  # the experiment of the last one
)
TOKEN = Table(
    "token",
    TABLES,
    Column("digest", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("label", Text, nullable=False),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
    Column("is_single_use", Integer, nullable=False, server_default=text("0")),
)
