"""Find the GPUs this process may use, in CUDA's order, and what a device name on the command line means."""

import os
import re
from collections.abc import Callable, Mapping, Sequence

from fulltilt.errors import ConfigError, DeviceError, format_nearest
from fulltilt.hardware.datasheet import find_data_sheet
from fulltilt.hardware.nvml import Nvml, NvmlDevice, RealNvml
from fulltilt.records import Device

DEVICE_NAMES = ("auto", "cpu", "cuda", "cuda:0")


def read_visible_devices(nvml: Nvml, environ: Mapping[str, str] | None = None) -> tuple[NvmlDevice, ...]:
    """List the devices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    An entry that names no device hides itself and all after it, as CUDA does. Numbers are taken in the order of the
    PCI bus: with GPUs of different speed CUDA counts otherwise unless ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.
    """
    environ = os.environ if environ is None else environ
    devices = nvml.read_devices()
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return devices
    visible: list[NvmlDevice] = []
    for entry in (part.strip() for part in listed.split(",")):
        match = _find_listed(entry, devices)
        if match is None or match in visible:
            break
        visible.append(match)
    return tuple(visible)


def find_nvml_index(uuid: str, nvml: Nvml) -> int | None:
    """Find NVML's index of the device that CUDA calls ``uuid`` (with or without "GPU-")."""
    wanted = uuid.lower().removeprefix("gpu-")
    uuids = {(device.uuid or "").lower().removeprefix("gpu-"): device.index for device in nvml.read_devices()}
    return uuids.get(wanted)


def list_rank_devices(
    wanted: str | int | Sequence[int], n_ranks: int | None, *, has_gpu: Callable[[], bool]
) -> list[str]:
    """List the devices of a run, one per rank: ``n_ranks`` of what ``wanted`` names, whether they exist or not.

    ``auto`` is the first GPU or the CPU, or as many GPUs as ranks; ``cpu`` takes any number of ranks.

    Args:
        has_gpu: Asked for ``auto`` only.

    Raises:
        ConfigError: the number of ranks and the devices do not go together.
    """
    if wanted == "auto":
        wanted = "cuda" if has_gpu() else "cpu"
    if wanted == "cpu" or (wanted == "cuda" and n_ranks is None):
        return [str(wanted)] * (n_ranks or 1)
    if wanted == "cuda":
        wanted = range(n_ranks or 1)
    if isinstance(wanted, str):
        devices = [wanted]
    else:
        devices = [f"cuda:{index}" for index in ([wanted] if isinstance(wanted, int) else wanted)]
    if n_ranks not in (None, len(devices)):
        raise ConfigError(
            f"n_ranks is {n_ranks}, run.device names {len(devices)} device{'s' * (len(devices) > 1)} "
            f"({', '.join(devices)}); leave n_ranks out, or name as many devices",
            key="run.n_ranks",
        )
    return devices


def resolve_device(
    name: str,
    nvml: Nvml | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    torch_version: str | None = None,
) -> str:
    """Turn ``auto | cpu | cuda | cuda:N`` into ``cpu`` or ``cuda:N``; ``auto`` is the first GPU, else the CPU.

    Args:
        nvml: Where to look for GPUs; the driver when not given.
        environ: Holds ``CUDA_VISIBLE_DEVICES``; the process' own when not given.
        torch_version: The installed one when not given. A build for the CPU ("+cpu") cannot use a GPU.

    Raises:
        DeviceError: the name is unknown, or the device is not there; says what is there.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise DeviceError(f"unknown device {name!r}: {format_nearest(name, DEVICE_NAMES)} (cuda:N for another GPU)")
    if name == "cpu":
        return "cpu"
    version = read_package_version("torch") if torch_version is None else torch_version
    built_for_cpu = bool(version and version.endswith("+cpu"))
    if name == "auto" and built_for_cpu:
        return "cpu"
    library = RealNvml() if nvml is None else nvml
    try:
        visible = read_visible_devices(library, environ)
        absence = library.absence or "CUDA_VISIBLE_DEVICES hides every GPU"
    finally:
        if nvml is None:
            library.close()
    if name == "auto":
        return "cuda:0" if visible else "cpu"
    index = int(match[1] or 0)
    if built_for_cpu:
        raise DeviceError(
            f"device {name} needs a torch built for CUDA, torch {version} is built for the CPU; "
            f"install a CUDA build or use --device cpu"
        )
    if not visible:
        raise DeviceError(f"device {name} is not there: {absence}; use --device cpu")
    if index >= len(visible):
        there = ", ".join(f"cuda:{i} ({device.name})" for i, device in enumerate(visible))
        raise DeviceError(f"device {name} is not there; there is {there}; set run.device to that")
    return f"cuda:{index}"


def build_device_records(nvml: Nvml, environ: Mapping[str, str] | None = None) -> tuple[Device, ...]:
    """Describe the visible GPUs for a ``Machine``; ``index`` is CUDA's."""
    records: list[Device] = []
    for index, device in enumerate(read_visible_devices(nvml, environ)):
        sheet = find_data_sheet(device.name, device.memory_total_bytes)
        records.append(
            Device(
                name=device.name,
                type="cuda",
                index=index,
                memory_total_bytes=device.memory_total_bytes,
                memory_free_bytes=nvml.read_status(device.index).memory_free_bytes,
                compute_capability=device.compute_capability,
                driver=nvml.driver,
                uuid=device.uuid,
                nominal_bf16_tflops=sheet.bf16_tflops if sheet else None,
                nominal_memory_gib_per_s=sheet.memory_gib_per_s if sheet else None,
            )
        )
    return tuple(records)


def read_package_version(name: str) -> str | None:
    """Read the version of an installed package without importing it."""
    from importlib import metadata  # 15 ms, of no use to the other readers

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _find_listed(entry: str, devices: tuple[NvmlDevice, ...]) -> NvmlDevice | None:
    if entry.startswith("GPU-"):
        found = [device for device in devices if (device.uuid or "").startswith(entry)]
    else:
        found = [device for device in devices if entry.isdigit() and device.index == int(entry)]
    return found[0] if len(found) == 1 else None
