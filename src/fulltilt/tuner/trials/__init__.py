"""Run a plan in a process of its own, and keep what was measured."""
