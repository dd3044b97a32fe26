"""Count what happens in a process that serves a lab; ``server.metrics`` adds what the records say."""

from prometheus_client import CollectorRegistry, Counter, Histogram

TURNS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
REQUESTS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)  # a renewal waits up to 15 s


class Metrics:
    """Holds the counters of one lab, from the start of its process on."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.ends = Counter("fulltilt_lab_attempts_ended", "Attempts that ended", ["outcome"], registry=registry)
        self.renewals = Counter("fulltilt_lab_lease_renewals", "Leases that runners renewed", registry=registry)
        self.turn_s = Histogram(
            "fulltilt_lab_turn_seconds", "Time of a turn of the queue", buckets=TURNS_S, registry=registry
        )
        self.request_s = Histogram(
            "fulltilt_lab_request_seconds",
            "Time from a request to the end of its answer",
            ["route", "status"],
            buckets=REQUESTS_S,
            registry=registry,
        )
