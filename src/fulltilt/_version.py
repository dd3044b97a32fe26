"""The version of the package; below every room, since results name it."""

__version__ = "0.1.0"
