"""Long queues: indices for the pages of the queue, and for what changed last."""

from alembic import op
from sqlalchemy import text

revision, down_revision = "0003", "0002"


def upgrade() -> None:
    urgent = (text("priority DESC"), "id")
    op.drop_index("ix_experiment_queue", "experiment")
    op.create_index("ix_experiment_queue", "experiment", ["state", "owner", *urgent])
    op.create_index("ix_experiment_sweep", "experiment", ["sweep", "state", *urgent])
    op.create_index("ix_event_state", "event", ["state", "seq"])
