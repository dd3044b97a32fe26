"""Show what a machine is doing: as a table, as a line, as JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fulltilt.records import encode, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from fulltilt.hardware import NvmlDevice, NvmlStatus
    from fulltilt.hardware.sampler import Sample

N_PROCESSES = 3  # of a GPU that a row names


def build_entry(sample: Sample) -> dict[str, Any]:
    """Return a reading as the JSON has it: quantities with their units in the names."""
    return {
        "time_s": round(time.time(), 3),
        "gpus": [
            {"name": device.name, "uuid": device.uuid, "memory_total_bytes": device.memory_total_bytes} | encode(status)
            for device, status in sample.gpus
        ],
        "cpu_pct": sample.cpu_pct,
        "load": sample.load,
        "memory_used_bytes": sample.memory_used_bytes,
        "memory_total_bytes": sample.memory_total_bytes,
        "disk_free_bytes": sample.disk_free_bytes,
    }


def describe(sample: Sample) -> str:
    """Describe a reading in one line."""
    parts = [time.strftime("%H:%M:%S")]
    for device, status in sample.gpus:
        cells = list_cells(device, status)
        parts.append(f"gpu {device.index}: " + ", ".join(cell for cell in cells[1:-1] if cell != "–"))
    if not sample.gpus:
        parts.append("no GPU")
    return " · ".join([*parts, *describe_host(sample)])


def build_table(sample: Sample) -> Table:
    """Build a row a GPU, and one for what all trainings share."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", caption=" · ".join(describe_host(sample)))
    table.caption_justify = "left"
    if not sample.gpus:
        table.title, table.title_justify = "no GPU here", "left"
        return table
    for name in ("gpu", "use", "memory", "power", "temperature", "clock", "slowed by", "processes"):
        table.add_column(name, overflow="fold")
    for device, status in sample.gpus:
        table.add_row(*list_cells(device, status))
    return table


def list_cells(device: NvmlDevice, status: NvmlStatus) -> list[str]:
    """Return name, use, memory, power, temperature, clock, what slows it, processes; a dash for what is not known."""
    used, total = status.memory_used_bytes, device.memory_total_bytes
    memory = "–" if used is None or total is None else f"{format_bytes(used)} of {format_bytes(total)}"
    limit = "" if status.power_limit_w is None else f" of {status.power_limit_w:.0f}"
    most = "" if status.sm_clock_max_mhz is None else f" of {status.sm_clock_max_mhz}"
    known = sorted(status.processes or (), key=lambda process: -(process.memory_used_bytes or 0))
    shown = [f"{process.pid} {format_bytes(process.memory_used_bytes or 0)}" for process in known[:N_PROCESSES]]
    more = [f"{len(known) - N_PROCESSES} more"] if len(known) > N_PROCESSES else []
    return [
        f"{device.index} {device.name}",
        "–" if status.utilization_pct is None else f"{status.utilization_pct:.0f} %",
        memory,
        "–" if status.power_w is None else f"{status.power_w:.0f}{limit} W",
        "–" if status.temperature_c is None else f"{status.temperature_c} °C",
        "–" if status.sm_clock_mhz is None else f"{status.sm_clock_mhz}{most} MHz",
        ", ".join(status.throttle_reasons or ()) or "–",
        ", ".join([*shown, *more]) or "–",
    ]


def list_lines(sample: Sample) -> list[str]:
    """Describe a reading, a line a GPU and some of the host."""
    cells = [list_cells(device, status) for device, status in sample.gpus]
    return [" · ".join(each) for each in cells] + describe_host(sample)


def describe_host(sample: Sample) -> list[str]:
    """Describe cores, memory and disk."""
    cpu = "" if sample.cpu_pct is None else f"{sample.cpu_pct:.0f} %, "
    return [
        f"cores {cpu}load {sample.load:.1f}",
        f"memory {format_bytes(sample.memory_used_bytes)} of {format_bytes(sample.memory_total_bytes)}",
        f"disk {format_bytes(sample.disk_free_bytes)} free",
    ]
