"""Inference that is held to targets: latency, memory, throughput, response, each measured under a stated load."""
