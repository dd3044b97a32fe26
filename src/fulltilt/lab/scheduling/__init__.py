"""Decide, as pure functions of records: who is next and where, what an end means, whose time is up."""
