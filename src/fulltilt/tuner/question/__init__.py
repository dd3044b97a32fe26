"""What is asked: the workload, its options, and the space of plans to search."""
