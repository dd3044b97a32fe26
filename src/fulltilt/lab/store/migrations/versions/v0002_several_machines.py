"""Several machines: owners, devices, fences, files in the depot, nodes, tokens."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, Text, text

revision, down_revision = "0002", "0001"


def upgrade() -> None:
    new = [Column("code", JSON), Column("wish", Text), Column("delay_s", Float)]
    counts = {"n_devices": "1", "n_lost": "0"}
    new += [Column(name, Integer, nullable=False, server_default=text(n)) for name, n in counts.items()]
    for column in (Column("owner", Text, nullable=False, server_default=""), *new):
        op.add_column("experiment", column)
    op.drop_index("ix_experiment_state", "experiment")
    op.create_index("ix_experiment_queue", "experiment", ["state", "owner", "priority", "id"])
    for name in ("fence", "engine", "ref"):
        op.add_column("attempt", Column(name, Text))
    op.execute("UPDATE attempt SET engine = 'local'")
    op.create_index("ix_attempt_fence", "attempt", ["fence"], unique=True)
    op.create_index("ix_event_experiment", "event", ["experiment"])
    op.create_table(
        "artefact",
        Column("experiment", Integer, ForeignKey("experiment.id"), primary_key=True),
        Column("attempt", Integer, primary_key=True),
        Column("name", Text, primary_key=True),
        Column("digest", Text, nullable=False),
        Column("n_bytes", sa.BigInteger, nullable=False),
        Column("time_s", Float, nullable=False),
    )
    op.create_table(
        "node",
        Column("name", Text, primary_key=True),
        Column("boot", Text, nullable=False),
        *(Column(name, JSON, nullable=False) for name in ("versions", "devices")),
        Column("seen_s", Float, nullable=False),
        Column("n_bad", Integer, nullable=False, server_default=text("0")),
        Column("last_bad", Integer),
    )
    op.create_table(
        "token",
        Column("digest", Text, primary_key=True),
        *(Column(name, Text, nullable=False) for name in ("role", "label")),
        Column("created_s", Float, nullable=False),
        Column("expires_s", Float),
        Column("is_single_use", Integer, nullable=False, server_default=text("0")),
    )
