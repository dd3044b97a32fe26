"""One suite for whatever answers as NVML: the fake, the real class over a scripted library, and over the driver.

The scripted library speaks like ``pynvml``: the same names, the same exceptions, figures in the driver's units.
"""

import dataclasses
import types

import pynvml
import pytest
from tests.fake_nvml import FakeNvml, build_status

from fulltilt.errors import DeviceError
from fulltilt.hardware import NvmlDevice, NvmlProcess, RealNvml

GIB = 2**30


class ScriptedLibrary:
    """Two devices: one that tells all, one that tells nothing but its name (as in a virtual machine)."""

    NVMLError = pynvml.NVMLError
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *, knows_event_reasons=True):
        self.n_open = 0
        self._knows_event_reasons = knows_event_reasons

    def __getattr__(self, name):
        if name not in ANSWERS:
            raise AttributeError(name)
        return lambda *given: self._answer(name, *given)

    def _answer(self, name, handle=None, *_):
        if name in ("nvmlInit", "nvmlShutdown"):
            self.n_open += 1 if name == "nvmlInit" else -1
        if name == "nvmlDeviceGetCurrentClocksEventReasons" and not self._knows_event_reasons:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        if name == "nvmlDeviceGetHandleByIndex":
            return handle
        if handle == 1 and name != "nvmlDeviceGetName":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return ("NVIDIA H200", "NVIDIA Virtual")[handle] if name == "nvmlDeviceGetName" else ANSWERS[name]


ANSWERS = {
    "nvmlInit": None,
    "nvmlShutdown": None,
    "nvmlDeviceGetCount": 2,
    "nvmlDeviceGetHandleByIndex": None,
    "nvmlDeviceGetName": None,
    "nvmlSystemGetDriverVersion": "580.1",
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x20 | 0x4000,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x40,
    "nvmlDeviceGetUUID": "GPU-1",
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMemoryInfo": types.SimpleNamespace(total=140 * GIB, used=40 * GIB, free=100 * GIB),
    "nvmlDeviceGetUtilizationRates": types.SimpleNamespace(gpu=87, memory=31),
    "nvmlDeviceGetClockInfo": 1800,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetPowerUsage": 611_400,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetComputeRunningProcesses": [types.SimpleNamespace(pid=42, usedGpuMemory=None)],
}


def build_fake():
    known = {"uuid": "GPU-1", "memory_total_bytes": 140 * GIB, "compute_capability": (9, 0)}
    silent = dict.fromkeys(known, "Not Supported")
    full = NvmlDevice(index=0, name="NVIDIA H200", **known)
    bare = NvmlDevice(index=1, name="NVIDIA Virtual", **dict.fromkeys(known), null_reasons=silent)
    status = build_status(memory_used_bytes=40 * GIB, memory_free_bytes=100 * GIB, utilization_pct=87.0)
    return FakeNvml([full, bare], {0: status}, driver="580.1")


def build_scripted():
    return RealNvml(ScriptedLibrary())


def build_real():
    nvml = RealNvml()
    if nvml.absence is not None:
        pytest.skip(f"needs an NVIDIA GPU and its driver: {nvml.absence}")
    return nvml


@pytest.fixture(params=[build_fake, build_scripted, build_real], ids=["fake", "scripted", "real"])
def nvml(request):
    library = request.param()
    yield library
    library.close()


def list_unexplained(record) -> set[str]:
    """Fields that are ``None`` without a reason, and reasons for fields that are not ``None``."""
    silent = {f.name for f in dataclasses.fields(record) if getattr(record, f.name) is None}
    return silent ^ set(record.null_reasons)


def test_devices_are_numbered_and_named_figures_are_in_their_units_or_have_a_reason(nvml):
    devices = nvml.read_devices()
    assert nvml.absence is None
    assert nvml.driver
    assert [device.index for device in devices] == list(range(len(devices)))
    for device in devices:
        status = nvml.read_status(device.index)
        assert device.name
        assert list_unexplained(device) | list_unexplained(status) == set()
        if None not in (status.memory_used_bytes, status.memory_free_bytes, device.memory_total_bytes):
            assert 0 < status.memory_used_bytes + status.memory_free_bytes <= device.memory_total_bytes
            assert device.memory_total_bytes > GIB
        assert status.utilization_pct is None or 0 <= status.utilization_pct <= 100
        utilization = nvml.read_utilization(device.index)
        assert (utilization.gpu_pct is None) == (utilization.reason is not None)
        assert utilization.gpu_pct is None or 0 <= utilization.gpu_pct <= 100


@pytest.mark.parametrize("index", [-1, 99])
def test_unknown_index_says_what_there_is(nvml, index):
    for read in (nvml.read_status, nvml.read_utilization):
        with pytest.raises(DeviceError, match=rf"index {index}: there are {len(nvml.read_devices())} "):
            read(index)


def test_after_close_there_is_nothing_and_a_second_close_is_harmless(nvml):
    nvml.close()
    nvml.close()
    assert (nvml.read_devices(), nvml.absence) == ((), "NVML was closed")
    with pytest.raises(DeviceError, match="NVML was closed"):
        nvml.read_status(0)


@pytest.mark.parametrize("build", [FakeNvml, RealNvml], ids=["fake", "real"])
def test_no_driver_is_no_devices_with_the_reason(build):
    nvml = build()
    if nvml.absence is None:
        nvml.close()
        pytest.skip("needs a machine without an NVIDIA driver")
    assert nvml.read_devices() == ()
    assert "NVIDIA driver" in nvml.absence
    with pytest.raises(DeviceError, match="NVIDIA driver"):
        nvml.read_utilization(0)
    nvml.close()


def test_answers_of_the_driver_are_translated_and_an_older_ones_too():
    status = build_scripted().read_status(0)
    assert (status.utilization_pct, status.sm_clock_mhz, status.sm_clock_max_mhz) == (87.0, 1800, 1980)
    assert status.throttle_reasons == ("sw_power_cap", "sw_thermal_slowdown", "bit_0x4000")
    assert (status.power_w, status.power_limit_w, status.temperature_c) == (611.4, 700.0, 61)
    assert status.processes == (NvmlProcess(pid=42, memory_used_bytes=None),)
    nvml = RealNvml(ScriptedLibrary(knows_event_reasons=False))
    assert nvml.read_status(0).throttle_reasons == ("hw_thermal_slowdown",)
    assert nvml.read_status(1).throttle_reasons is None


def test_library_is_shut_down_once():
    library = ScriptedLibrary()
    nvml = RealNvml(library)
    assert library.n_open == 1
    nvml.close()
    nvml.close()
    assert library.n_open == 0


def test_names_used_are_those_of_the_real_library():
    names = [*ANSWERS, *(name for name in vars(ScriptedLibrary) if name.startswith("NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_fake_replays_readings_in_order_and_stays_at_the_last():
    device = NvmlDevice(index=0, name="x", uuid=None, memory_total_bytes=None, compute_capability=None)
    nvml = FakeNvml([device], {0: [build_status(utilization_pct=10.0), build_status(utilization_pct=90.0)]})
    assert [nvml.read_utilization(0).gpu_pct for _ in range(3)] == [10.0, 90.0, 90.0]
