"""Clocks that a phase timer reads: the host's, a CUDA stream's, and one for tests.

A mark is a point in the work, not in the host's time: a device reaches it when everything queued before it is done.
Work queued early is billed to the phase that queued it; time between marks in which the device was idle is starvation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

N_POOLED_EVENTS = 512


class Clock(Protocol):
    """Marks points in the work and tells the time between them. No method waits for the device.

    Attributes:
        is_device: Marks are points in a device's queue, so they may be reached later than they are set.
    """

    is_device: bool

    def mark(self) -> Any:
        """Set a mark behind all work queued so far and return its handle."""

    def is_ready(self, handle: Any) -> bool:
        """Whether the mark was reached, so that it may be read."""

    def elapsed_ms(self, a: Any, b: Any) -> float:
        """Milliseconds from mark ``a`` to mark ``b``. Raises RuntimeError unless both were reached."""

    def release(self, handles: Iterable[Any]) -> None:
        """Give marks back that nobody reads any more."""

    def host_ns(self) -> int:
        """The host's monotonic time in nanoseconds."""


class HostClock:
    """A clock for the CPU (``time.perf_counter_ns``), where a mark is reached when it is set."""

    is_device = False
    mark = staticmethod(time.perf_counter_ns)
    host_ns = staticmethod(time.perf_counter_ns)

    def is_ready(self, handle: int) -> bool:
        return True

    def elapsed_ms(self, a: int, b: int) -> float:
        return (b - a) / 1e6

    def release(self, handles: Iterable[int]) -> None:
        pass


class CudaClock:
    """A clock of timing events on the stream that is current on ``device`` when the mark is set.

    Work on another stream is seen only through the wait for it: a copy that hides behind compute is billed nothing.

    Args:
        device: A CUDA device; the current one when None.
        n_events: Events in the pool at the start. It grows when a queue is longer than that.

    **Device**: never synchronises; marks are read by ``query()``. Not for use inside CUDA graph capture.
    """

    is_device = True
    host_ns = staticmethod(time.perf_counter_ns)

    def __init__(self, device: torch.device | str | int | None = None, n_events: int = N_POOLED_EVENTS):
        import torch

        index = torch.cuda.current_device() if device is None else torch.device(device).index
        self._device = torch.cuda.current_device() if index is None else index
        self._current_stream = torch.cuda.current_stream
        self._new_event = torch.cuda.Event
        self._pool = [self._new_event(enable_timing=True) for _ in range(n_events)]

    def mark(self) -> torch.cuda.Event:
        event = self._pool.pop() if self._pool else self._new_event(enable_timing=True)
        event.record(self._current_stream(self._device))
        return event

    def is_ready(self, handle: torch.cuda.Event) -> bool:
        return handle.query()

    def elapsed_ms(self, a: torch.cuda.Event, b: torch.cuda.Event) -> float:
        return a.elapsed_time(b)

    def release(self, handles: Iterable[torch.cuda.Event]) -> None:
        self._pool.extend(handles)


class FakeClock:
    """A clock for tests that stands still until told otherwise, with a queue that imitates a device.

    Args:
        is_device: Marks are points in the queue (as on CUDA); else host time (as on a CPU), and queued work
            blocks the host.
        ready_delay_ms: How much later than its point in the queue a mark can be read.
    """

    def __init__(self, *, is_device: bool = False, ready_delay_ms: float = 0.0):
        self.is_device = is_device
        self._delay_ns = round(ready_delay_ms * 1e6)
        self._now_ns = self._queue_ends_ns = 0

    def advance(self, ms: float) -> None:
        """The host is busy, or sleeps, for ``ms``."""
        self._now_ns += round(ms * 1e6)

    def enqueue(self, ms: float) -> None:
        """Queue ``ms`` of device work; the host goes on at once unless there is no device."""
        if not self.is_device:
            self.advance(ms)
        self._queue_ends_ns = max(self._queue_ends_ns, self._now_ns) + round(ms * 1e6) * self.is_device

    def synchronize(self) -> None:
        """Let the host wait until the queue is empty and its marks can be read."""
        self._now_ns = max(self._now_ns, self._queue_ends_ns + self._delay_ns)

    def mark(self) -> int:
        if not self.is_device:
            return self._now_ns
        self._queue_ends_ns = max(self._now_ns, self._queue_ends_ns)
        return self._queue_ends_ns

    def is_ready(self, handle: int) -> bool:
        return self._now_ns >= handle + self._delay_ns

    def elapsed_ms(self, a: int, b: int) -> float:
        if not (self.is_ready(a) and self.is_ready(b)):
            raise RuntimeError("a mark was read before the device reached it")
        return (b - a) / 1e6

    def release(self, handles: Iterable[int]) -> None:
        pass

    def host_ns(self) -> int:
        return self._now_ns
