"""Ordering, placing and loading samples, and handling bad ones."""
