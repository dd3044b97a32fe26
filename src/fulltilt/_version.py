"""The version of the package, which result files name."""

__version__ = "0.1.0"
