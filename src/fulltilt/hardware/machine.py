"""Read the machine as this process sees it, in one record."""

import hashlib
import os
import platform
import socket
from collections.abc import Mapping

from fulltilt.hardware._files import Root, read_text
from fulltilt.hardware.cgroup import read_memory_limit_bytes
from fulltilt.hardware.cpu import count_usable_cores, read_cpu_model, read_memory_bytes
from fulltilt.hardware.devices import build_device_records, read_package_version, read_visible_devices
from fulltilt.hardware.filesystem import read_shm
from fulltilt.hardware.nvml import Nvml, RealNvml
from fulltilt.records import Device, Machine

PACKAGES = ("torch", "numpy", "h5py", "torchvision", "timm")


def read_machine(root: Root = "/", *, nvml: Nvml | None = None, environ: Mapping[str, str] | None = None) -> Machine:
    """Read all there is to know without torch or a CUDA context. Cost: 30 ms.

    A figure that could not be read is ``None``, and ``null_reasons`` says why.
    """
    import psutil  # 30 ms, of no use to the other readers

    library = RealNvml() if nvml is None else nvml
    try:
        devices = build_device_records(library, environ)
        reasons = _explain_devices(library, devices, environ)
    finally:
        if nvml is None:
            library.close()
    model = read_cpu_model(root)
    n_physical = psutil.cpu_count(logical=False)
    total_bytes, available_bytes = read_memory_bytes(root)
    limit_bytes = read_memory_limit_bytes(root)
    shm = read_shm(root)
    missing = {
        "cpu_model": None if model else "/proc/cpuinfo names none",
        "n_cores_physical": None if n_physical else "the kernel does not tell cores from hardware threads here",
        "memory_limit_bytes": None if limit_bytes else "no control group limits the memory",
        "shm_total_bytes": None if shm.total_bytes is not None else "there is no /dev/shm",
    }
    return Machine(
        hostname_hash=compute_hostname_hash(socket.gethostname()),
        # "Linux 6.18", without the patch level and the vendor's suffix
        system=" ".join([platform.system(), ".".join(platform.release().split("-")[0].split(".")[:2])]),
        is_wsl=is_wsl(root, environ),
        cpu_model=model or "unknown",
        n_cores_physical=n_physical,
        n_cores_logical=os.cpu_count() or 1,
        n_cores_usable=count_usable_cores(root),
        memory_total_bytes=total_bytes,
        memory_available_bytes=available_bytes,
        memory_limit_bytes=limit_bytes,
        shm_total_bytes=shm.total_bytes,
        devices=devices,
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := read_package_version(name))},
        null_reasons=reasons | {name: reason for name, reason in missing.items() if reason},
    )


def is_wsl(root: Root = "/", environ: Mapping[str, str] | None = None) -> bool:
    """Whether this is Windows' Linux: its kernel names Microsoft, its shells carry ``WSL_DISTRO_NAME``."""
    environ = os.environ if environ is None else environ
    return "microsoft" in (read_text(root, "/proc/version") or "").lower() or bool(environ.get("WSL_DISTRO_NAME"))


def compute_hostname_hash(hostname: str) -> str:
    """Compute twelve hex digits that tell two machines apart without naming them."""
    return hashlib.sha256(hostname.encode()).hexdigest()[:12]


def _explain_devices(nvml: Nvml, devices: tuple[Device, ...], environ: Mapping[str, str] | None) -> dict[str, str]:
    if not devices:
        return {"devices": nvml.absence or "CUDA_VISIBLE_DEVICES hides every GPU"}
    reasons = {}
    for device, source in zip(devices, read_visible_devices(nvml, environ), strict=True):
        where = f"devices[{device.index}]"
        reasons |= {f"{where}.{field}": reason for field, reason in source.null_reasons.items()}
        if device.memory_free_bytes is None:
            reason = nvml.read_status(source.index).null_reasons.get("memory_free_bytes", "NVML gave no figure")
            reasons[f"{where}.memory_free_bytes"] = reason
        if device.nominal_memory_gib_per_s is None:
            reasons[f"{where}.nominal_memory_gib_per_s"] = f"no data sheet for {device.name}"
        if device.nominal_bf16_tflops is None:
            reasons[f"{where}.nominal_bf16_tflops"] = f"no dense bf16 rate known for {device.name}"
        if device.driver is None:
            reasons[f"{where}.driver"] = "NVML gave no driver version"
    return reasons
