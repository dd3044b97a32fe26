"""Say what a search is asked: the workload, its options, and the space of plans."""
