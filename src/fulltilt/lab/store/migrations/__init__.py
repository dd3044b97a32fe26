"""Bring the database of a lab up to date, one step after the other (Alembic)."""
