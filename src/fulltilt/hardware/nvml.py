"""Ask NVIDIA's management library what the driver knows of each GPU, without a CUDA context.

What a device does not tell is ``None`` with a reason.
An index is NVML's, in the order of the PCI bus; CUDA may count otherwise, and a UUID ties the two together.

Source: NVML API reference, "Device Queries". Each field names the ``nvidia-smi`` query that shows the same figure.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any, Protocol

from fulltilt.errors import DeviceError

THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NvmlDevice:
    """What does not change of a GPU while the machine runs."""

    index: int
    name: str
    uuid: str | None  # uuid
    memory_total_bytes: int | None  # memory.total
    compute_capability: tuple[int, int] | None  # compute_cap
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NvmlProcess:
    """A process with a context on the device. In a container the id is the host's."""

    pid: int
    memory_used_bytes: int | None  # compute-apps: used_memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NvmlStatus:
    """One reading of what changes."""

    memory_used_bytes: int | None  # memory.used
    memory_free_bytes: int | None  # memory.free
    utilization_pct: float | None  # utilization.gpu: share of the driver's last window in which any kernel ran
    sm_clock_mhz: int | None  # clocks.sm
    sm_clock_max_mhz: int | None  # clocks.max.sm
    throttle_reasons: tuple[str, ...] | None  # clocks_event_reasons.active
    power_w: float | None  # power.draw
    power_limit_w: float | None  # enforced.power.limit
    temperature_c: int | None  # temperature.gpu
    processes: tuple[NvmlProcess, ...] | None  # compute-apps
    null_reasons: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Utilization:
    gpu_pct: float | None
    reason: str | None = None  # why there is no figure


class Nvml(Protocol):
    """What fulltilt asks of the driver. An index that no device has raises ``DeviceError``."""

    @property
    def absence(self) -> str | None:
        """Why there are no devices; ``None`` when there are."""

    @property
    def driver(self) -> str | None: ...

    def read_devices(self) -> tuple[NvmlDevice, ...]: ...

    def read_status(self, index: int) -> NvmlStatus: ...

    def read_utilization(self, index: int) -> Utilization: ...

    def close(self) -> None:
        """Let go of the library; harmless when repeated."""


class RealNvml:
    """The driver's own library.

    Args:
        library: The ``pynvml`` module, or one that speaks like it.
    """

    def __init__(self, library: Any = None):
        if library is None:
            library = importlib.import_module("pynvml")  # nvidia-ml-py, 20 ms: only where it is used
        self._library = library
        self._handles: list[Any] = []
        self._open = False
        self.driver: str | None = None
        self.absence: str | None = None
        try:
            library.nvmlInit()
            self._open = True
            self._handles = [library.nvmlDeviceGetHandleByIndex(i) for i in range(library.nvmlDeviceGetCount())]
            self.driver = library.nvmlSystemGetDriverVersion()
        except library.NVMLError as problem:
            self.absence = f"no answer from the NVIDIA driver: {problem}"
        if not self._handles and self.absence is None:
            self.absence = "the NVIDIA driver lists no device"

    def read_devices(self) -> tuple[NvmlDevice, ...]:
        return tuple(self._read_device(i) for i in range(len(self._handles)))

    def read_status(self, index: int) -> NvmlStatus:
        handle, library, reasons = self._find(index), self._library, dict[str, str]()
        ask = functools.partial(self._ask, reasons)
        memory = ask("memory_used_bytes memory_free_bytes", library.nvmlDeviceGetMemoryInfo, handle)
        rates = ask("utilization_pct", library.nvmlDeviceGetUtilizationRates, handle)
        mask = ask("throttle_reasons", self._read_throttle_mask, handle)
        found = ask("processes", library.nvmlDeviceGetComputeRunningProcesses, handle)
        sm = library.NVML_CLOCK_SM
        power_mw = ask("power_w", library.nvmlDeviceGetPowerUsage, handle)
        limit_mw = ask("power_limit_w", library.nvmlDeviceGetEnforcedPowerLimit, handle)
        processes = [NvmlProcess(pid=p.pid, memory_used_bytes=p.usedGpuMemory) for p in found or ()]
        return NvmlStatus(
            memory_used_bytes=None if memory is None else memory.used,
            memory_free_bytes=None if memory is None else memory.free,
            utilization_pct=None if rates is None else float(rates.gpu),
            sm_clock_mhz=ask("sm_clock_mhz", library.nvmlDeviceGetClockInfo, handle, sm),
            sm_clock_max_mhz=ask("sm_clock_max_mhz", library.nvmlDeviceGetMaxClockInfo, handle, sm),
            throttle_reasons=None if mask is None else decode_throttle_reasons(mask),
            power_w=None if power_mw is None else power_mw / 1000,
            power_limit_w=None if limit_mw is None else limit_mw / 1000,
            temperature_c=ask("temperature_c", library.nvmlDeviceGetTemperature, handle, library.NVML_TEMPERATURE_GPU),
            processes=None if found is None else tuple(processes),
            null_reasons=reasons,
        )

    def read_utilization(self, index: int) -> Utilization:
        handle, reasons = self._find(index), dict[str, str]()
        rates = self._ask(reasons, "gpu_pct", self._library.nvmlDeviceGetUtilizationRates, handle)
        return Utilization(gpu_pct=None if rates is None else float(rates.gpu), reason=reasons.get("gpu_pct"))

    def close(self) -> None:
        if self._open:
            self._open, self._handles = False, []
            self.absence = "NVML was closed"
            self._library.nvmlShutdown()

    def _read_device(self, index: int) -> NvmlDevice:
        handle, library, reasons = self._handles[index], self._library, dict[str, str]()
        ask = functools.partial(self._ask, reasons)
        memory = ask("memory_total_bytes", library.nvmlDeviceGetMemoryInfo, handle)
        capability = ask("compute_capability", library.nvmlDeviceGetCudaComputeCapability, handle)
        return NvmlDevice(
            index=index,
            name=ask("name", library.nvmlDeviceGetName, handle) or "unknown NVIDIA device",
            uuid=ask("uuid", library.nvmlDeviceGetUUID, handle),
            memory_total_bytes=None if memory is None else memory.total,
            compute_capability=None if capability is None else tuple(capability),
            null_reasons=reasons,
        )

    def _read_throttle_mask(self, handle: Any) -> int:
        """Read the mask, by its old name with drivers before 535."""
        try:
            return self._library.nvmlDeviceGetCurrentClocksEventReasons(handle)
        except self._library.NVMLError_FunctionNotFound:
            return self._library.nvmlDeviceGetCurrentClocksThrottleReasons(handle)

    def _ask(self, reasons: dict[str, str], fields: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call the library; where it gives no answer, note the reason for each of ``fields`` and return None."""
        try:
            return call(*arguments)
        except self._library.NVMLError as problem:
            reasons.update(dict.fromkeys(fields.split(), f"NVML: {problem}"))
            return None

    def _find(self, index: int) -> Any:
        if not 0 <= index < len(self._handles):
            raise DeviceError(describe_missing_index(index, len(self._handles), self.absence))
        return self._handles[index]


def decode_throttle_reasons(mask: int) -> tuple[str, ...]:
    """Name the bits set; a bit of a newer driver comes as ``bit_0x…``."""
    bits = [1 << n for n in range(mask.bit_length()) if mask >> n & 1]
    return tuple(THROTTLE_REASONS.get(bit, f"bit_{bit:#x}") for bit in bits)


def describe_missing_index(index: int, count: int, absence: str | None) -> str:
    there = absence or f"there are {count} (0 to {count - 1})"
    return f"no NVIDIA device with index {index}: {there}"
