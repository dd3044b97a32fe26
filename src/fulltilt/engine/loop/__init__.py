"""The training loop, and what happens between its steps."""
