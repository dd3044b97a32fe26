"""Count what a service does: metrics for Prometheus, and the last minute of it for the page."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SOURCES = ("model", "shared", "memory", "disk")
"""Where an answer came from; shared: together with a request that asked for the same."""

RECENT_S = 60
MOST_RECENT = 50_000  # requests that the page knows
RESPONSES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    end_s: float
    response_s: float
    status: int


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    end_s: float
    n_samples: int


class Figures:
    """The figures of one service. Threads may tell it at any time."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock, self.began_s = clock, threading.Lock(), clock()
        self._requests: collections.deque[Request] = collections.deque(maxlen=MOST_RECENT)
        self._batches: collections.deque[Batch] = collections.deque(maxlen=MOST_RECENT)
        self._n_tokens = self._n_padding = 0
        self.sources = dict.fromkeys(SOURCES, 0)
        self.model_s_per_sample = 0.0  # smoothed, for Retry-After
        self.registry = registry = CollectorRegistry()
        self._status = Counter("fulltilt_infer_requests", "Requests", ["status"], registry=registry)
        self._response_s = Histogram(
            "fulltilt_infer_response_seconds", "From request to answer", buckets=RESPONSES_S, registry=registry
        )
        self._model_s = Histogram(
            "fulltilt_infer_model_seconds", "The model's part of a batch", buckets=RESPONSES_S, registry=registry
        )
        self._batch = Histogram("fulltilt_infer_batch_samples", "Samples", buckets=BATCHES, registry=registry)
        self._source = Counter("fulltilt_infer_answers", "Samples answered", ["source"], registry=registry)
        self._back_offs = Counter("fulltilt_infer_memory_back_offs", "Batches made smaller", registry=registry)

    def watch(self, name: str, said: str, read: Callable[[], float]) -> None:
        """Offer what ``read`` returns as a gauge."""
        Gauge(f"fulltilt_infer_{name}", said, registry=self.registry).set_function(read)

    def note_request(self, status: int, response_s: float) -> None:
        self._status.labels(status).inc()
        if status == 200:
            self._response_s.observe(response_s)
        self._requests.append(Request(self._clock(), response_s, status))

    def note_source(self, source: str, n_samples: int = 1) -> None:
        self._source.labels(source).inc(n_samples)
        self.sources[source] += n_samples

    def note_batch(self, lengths: Sequence[int], padded_length: int, model_s: float) -> None:
        n_samples = len(lengths)
        self._batch.observe(n_samples)
        self._model_s.observe(model_s)
        self._n_tokens += n_samples * padded_length
        self._n_padding += n_samples * padded_length - sum(lengths)
        self._batches.append(Batch(self._clock(), n_samples))
        each_s = model_s / n_samples
        self.model_s_per_sample += 0.1 * (each_s - self.model_s_per_sample) if self.model_s_per_sample else each_s

    def note_back_off(self) -> None:
        self._back_offs.inc()

    def list_requests(self) -> list[Request]:
        """Return the requests that ended in the last minute."""
        since_s = self._clock() - RECENT_S
        return [request for request in self._requests.copy() if request.end_s >= since_s]

    def count_batches(self) -> dict[int, int]:
        """Count the batches of the last minute, by size up to the next power of two."""
        since_s = self._clock() - RECENT_S
        recent = (batch.n_samples for batch in self._batches.copy() if batch.end_s >= since_s)
        sizes = collections.Counter(1 << (n_samples - 1).bit_length() for n_samples in recent)
        return dict(sorted(sizes.items()))

    @property
    def now_s(self) -> float:
        return self._clock()

    @property
    def padding_share(self) -> float:
        return self._n_padding / self._n_tokens if self._n_tokens else 0.0
