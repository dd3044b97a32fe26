"""A fake clock with a queue of device work, for tests of phase timers without a GPU."""

from collections.abc import Iterable


class FakeClock:
    """A clock that stands still until told otherwise, with a queue that imitates a device.

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
