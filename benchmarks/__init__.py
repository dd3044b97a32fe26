"""Benchmarks: measured claims with a result file each. ``python -m benchmarks NAME``; ``make bench`` runs them all."""
