"""Count what a service does: metrics for Prometheus, and the last minute of it for the page."""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SOURCES = ("model", "shared", "memory", "disk")  # of answers; shared: with a request that asked for the same
RECENT_S = 60
MOST_RECENT = 50_000  # requests that the page knows
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Figures:
    """The figures of one service."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self._requests = np.full((MOST_RECENT, 3), -np.inf)  # no objects, which would be searched for garbage
        self._n_requests = 0
        self.sources: dict[str, int] = dict.fromkeys(SOURCES, 0)
        self.model_s_per_sample = 0.0  # smoothed, for Retry-After
        self.registry = to = CollectorRegistry()
        self._status = Counter("fulltilt_infer_requests", "Requests", ["status"], registry=to)
        self._response_s = Histogram("fulltilt_infer_response_seconds", "Responses", buckets=SECONDS, registry=to)
        self._model_s = Histogram("fulltilt_infer_model_seconds", "Calls of the model", buckets=SECONDS, registry=to)
        self._batch = Histogram("fulltilt_infer_batch_samples", "Samples", buckets=BATCHES, registry=to)
        self._source = Counter("fulltilt_infer_answers", "Samples answered", ["source"], registry=to)

    def watch(self, name: str, said: str, read: Callable[[], float]) -> None:
        """Offer what ``read`` returns as a gauge."""
        Gauge(f"fulltilt_infer_{name}", said, registry=self.registry).set_function(read)

    def note_request(self, status: int, response_s: float) -> None:
        self._status.labels(status).inc()
        if status == 200:
            self._response_s.observe(response_s)
        self._requests[self._n_requests % MOST_RECENT] = time.monotonic(), response_s, status
        self._n_requests += 1

    def note_source(self, source: str) -> None:
        self._source.labels(source).inc()
        self.sources[source] += 1

    def note_batch(self, n_samples: int, model_s: float) -> None:
        self._batch.observe(n_samples)
        self._model_s.observe(model_s)
        each_s = model_s / n_samples
        self.model_s_per_sample += 0.1 * (each_s - self.model_s_per_sample) if self.model_s_per_sample else each_s

    def list_requests(self) -> tuple[NDArray[np.float64], float]:
        """Return the requests of the last minute or less: rows of end, response and status; and the seconds of it."""
        now_s, end_s = time.monotonic(), self._requests[:, 0]
        since_s = max(now_s - RECENT_S, self.began_s, end_s.min())
        return self._requests[end_s >= since_s], now_s - since_s
