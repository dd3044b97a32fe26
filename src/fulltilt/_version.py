"""This module holds the version; ``--version``, exported weights and the fingerprint of a search name it."""

__version__ = "0.1.0"
