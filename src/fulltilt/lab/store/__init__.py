"""Keep the records of a lab, in SQLite or PostgreSQL; every change of a state is one guarded transaction."""

from fulltilt.lab.store.opening import DATABASE, copy_database, open_store
from fulltilt.lab.store.store import StaleAttemptError, Store, compute_digest

__all__ = ["DATABASE", "StaleAttemptError", "Store", "compute_digest", "copy_database", "open_store"]
