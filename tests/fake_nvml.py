"""A fake NVML that answers from records, for machines without a GPU."""

import dataclasses
from collections.abc import Mapping, Sequence

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
