"""How a plan is run in a process of its own, and what is kept of it."""
