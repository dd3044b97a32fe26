"""One machine: sweeps, experiments, attempts, events. Labs of that time have these tables and no version."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, Text

revision, down_revision = "0001", None


def upgrade() -> None:
    op.create_table(
        "sweep",
        Column("name", Text, primary_key=True),
        Column("source", Text, nullable=False, unique=True),
        Column("created_s", Float, nullable=False),
    )
    op.create_table(
        "experiment",
        Column("id", Integer, primary_key=True),
        Column("sweep", Text, ForeignKey("sweep.name"), nullable=False),
        Column("digest", Text, nullable=False),
        *(Column(name, JSON, nullable=False) for name in ("point", "overrides", "config")),
        Column("priority", Integer, nullable=False),
        Column("state", Text, nullable=False, index=True),
        Column("attempt", Integer, nullable=False),
        Column("created_s", Float, nullable=False),
        sa.UniqueConstraint("sweep", "digest"),
    )
    op.create_table(
        "attempt",
        Column("experiment", Integer, ForeignKey("experiment.id"), primary_key=True),
        Column("number", Integer, primary_key=True),
        Column("node", Text, nullable=False),
        Column("devices", JSON, nullable=False),
        *(Column(name, Integer) for name in ("n_threads", "pid")),
        Column("started_s", Float, nullable=False),
        Column("ended_s", Float),
        *(Column(name, Text) for name in ("outcome", "reason")),
        Column("metrics", JSON),
    )
    op.create_table(
        "event",
        Column("seq", Integer, primary_key=True),
        Column("experiment", Integer, ForeignKey("experiment.id"), nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("arrow", Text, nullable=False),
        Column("state", Text, nullable=False),
        Column("time_s", Float, nullable=False),
    )
