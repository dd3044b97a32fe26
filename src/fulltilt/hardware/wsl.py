"""Describe Windows' Linux (WSL): what it gives a training run, and what to change on the Windows side.

Source: Microsoft, "Advanced settings configuration in WSL" (.wslconfig) and "GPU accelerated machine learning";
NVIDIA, "CUDA on WSL User Guide" (the driver's library comes from Windows, page-locked memory is limited).
"""

import dataclasses
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from fulltilt.hardware._files import Root, parse_table, read_text
from fulltilt.hardware.cpu import read_memory_bytes
from fulltilt.hardware.machine import is_wsl
from fulltilt.hardware.nvml import Nvml
from fulltilt.records import format_bytes

USABLE_SHARE = 0.95  # of a GPU's memory: beyond it WSL's driver spills to host memory instead of failing
DRIVER_LIBRARY = "usr/lib/wsl/lib/libcuda.so.1"
PINNED_ADVICE = (
    "page-locked memory is limited (0.5 to 1 GiB have been reported): with data.pin_memory true, CUDA may report "
    "out of memory while the GPU has room; then use data.pin_memory false"
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WslReport:
    """What WSL offers here, and what to do about it."""

    version: Literal[1, 2]  # version 1 has no GPU
    memory_total_bytes: int
    swap_total_bytes: int
    config_path: str | None  # the .wslconfig in a Windows home, None when none can be seen
    config_memory: str | None  # as written there: "20GB"
    config_swap: str | None
    gpu: str | None  # None when a GPU can be used, else why not
    advice: tuple[str, ...]  # one sentence each


def compute_usable_device_bytes(total_bytes: int, *, is_wsl: bool) -> int:
    """Compute how much of a GPU's memory may be used: under WSL 95 %, before the driver begins to spill."""
    return int(USABLE_SHARE * total_bytes) if is_wsl else total_bytes


def read_wsl(nvml: Nvml, root: Root = "/", environ: Mapping[str, str] | None = None) -> WslReport | None:
    """Read the report; None outside of WSL."""
    environ = os.environ if environ is None else environ
    kernel = (read_text(root, "/proc/version") or "").lower()
    if not is_wsl(root, environ):
        return None
    version: Literal[1, 2] = 2 if "wsl2" in kernel or (Path(root) / "dev/dxg").exists() else 1
    path = _find_config(root, environ)
    settings = _read_settings(path)
    gpu = _explain_gpu(nvml, root, version)
    memory = settings.get("memory")
    total_bytes = read_memory_bytes(root)[0]
    return WslReport(
        version=version,
        memory_total_bytes=total_bytes,
        swap_total_bytes=parse_table(read_text(root, "/proc/meminfo") or "").get("SwapTotal", 0) * 1024,
        config_path=None if path is None else str(path),
        config_memory=memory,
        config_swap=settings.get("swap"),
        gpu=gpu,
        advice=tuple(_advise(version, total_bytes, path, memory, gpu)),
    )


def _advise(version: int, total_bytes: int, path: Path | None, memory: str | None, gpu: str | None) -> list[str]:
    advice = []
    if version == 1:
        advice.append("WSL 1 has no GPU: convert the distribution (wsl --set-version NAME 2)")
    if memory is None and version == 2:
        where = "%UserProfile%\\.wslconfig" if path is None else str(path)
        advice.append(
            f"Linux sees {format_bytes(total_bytes)}, by default half of what Windows has: for more, write [wsl2], "
            f"memory=20GB and swap=8GB (with your own figures) into {where}, then run wsl --shutdown"
        )
    if gpu is not None and version == 2:
        advice.append(
            "for a GPU, install NVIDIA's driver on Windows only, none inside WSL, and run wsl --update; nvidia-smi "
            "must answer here"
        )
    if gpu is None:
        advice.append(PINNED_ADVICE)
    advice.append("keep data and runs on the Linux side (~), not under /mnt/c: every access there crosses to Windows")
    return advice


def _explain_gpu(nvml: Nvml, root: Root, version: int) -> str | None:
    if version == 1:
        return "WSL 1 passes no GPU through"
    if not (Path(root) / "dev/dxg").exists():
        return "there is no /dev/dxg: Windows offers this distribution no GPU"
    if not (Path(root) / DRIVER_LIBRARY).exists():
        return f"/dev/dxg is there, /{DRIVER_LIBRARY} is not: the Windows driver for NVIDIA is missing or too old"
    return nvml.absence


def _find_config(root: Root, environ: Mapping[str, str]) -> Path | None:
    """Find the .wslconfig of the user that USERPROFILE names, else the only one there is."""
    name = re.split(r"[\\/]", environ.get("USERPROFILE", "").rstrip("\\/"))[-1]
    try:
        found = list((Path(root) / "mnt/c/Users").glob(f"{glob.escape(name) or '*'}/.wslconfig"))
    except OSError:
        return None
    return found[0] if len(found) == 1 else None


def _read_settings(path: Path | None) -> dict[str, str]:
    """Read the section [wsl2], keys in lower case; lines that configparser would refuse are passed over."""
    text = "" if path is None else path.read_text(errors="replace")
    section, settings = "", {}
    for line in text.splitlines():
        line = line.split("#", 1)[0].strip()
        if line.startswith("["):
            section = line.strip("[]").strip().lower()
        elif "=" in line and section == "wsl2":
            key, value = line.split("=", 1)
            settings[key.strip().lower()] = value.strip()
    return settings
