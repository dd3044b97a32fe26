"""Preparing text as tokens, and reading it."""
