"""A queue of experiments over the devices of a machine: durable rows, one process an attempt, nothing lost."""
