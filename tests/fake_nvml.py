"""Stand-ins for devices: an NVML that answers from records, and a clock that stands still until told otherwise."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from fulltilt.errors import DeviceError
from fulltilt.hardware import NvmlDevice, NvmlStatus, Utilization
from fulltilt.hardware.nvml import describe_missing_index

_NOT_GIVEN = "the fake was given no figure"
_STATUS_FIELDS = tuple(f.name for f in dataclasses.fields(NvmlStatus) if f.name != "null_reasons")


def build_status(**known: object) -> NvmlStatus:
    """Build a status with ``known`` fields; the others are ``None`` with a reason."""
    missing = {name: _NOT_GIVEN for name in _STATUS_FIELDS if known.get(name) is None}
    return NvmlStatus(**dict.fromkeys(_STATUS_FIELDS, None) | known, null_reasons=missing)  # type: ignore[arg-type]


class FakeNvml:
    """Devices and their readings, told beforehand.

    Args:
        devices: The devices there are, in NVML's order; none stands for a machine without a GPU.
        statuses: Readings by device index, delivered one after the other; the last one repeats. A single one
            may come bare. A device without any reads nothing, with the reason.
        driver: Version of the driver.
        absence: Why there are no devices.
    """

    def __init__(
        self,
        devices: Sequence[NvmlDevice] = (),
        statuses: Mapping[int, NvmlStatus | Sequence[NvmlStatus]] | None = None,
        *,
        driver: str | None = None,
        absence: str | None = None,
    ):
        given = statuses or {}
        self._devices = tuple(devices)
        self._statuses = {i: [s] if isinstance(s, NvmlStatus) else list(s) for i, s in given.items()}
        self.driver = driver
        self.absence = absence or (None if self._devices else "the NVIDIA driver lists no device")

    def read_devices(self) -> tuple[NvmlDevice, ...]:
        return self._devices

    def read_status(self, index: int) -> NvmlStatus:
        if index not in {device.index for device in self._devices}:
            raise DeviceError(describe_missing_index(index, len(self._devices), self.absence))
        waiting = self._statuses.get(index) or [build_status()]
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    def read_utilization(self, index: int) -> Utilization:
        status = self.read_status(index)
        return Utilization(gpu_pct=status.utilization_pct, reason=status.null_reasons.get("utilization_pct"))

    def close(self) -> None:
        self._devices, self.absence = (), "NVML was closed"


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
