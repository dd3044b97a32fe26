"""``fulltilt machine``: print hardware and packages, with measured and data-sheet peak matmul and memory-copy rates."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from fulltilt.cli._shared import build_console, print_result, write_json
from fulltilt.records import format_bytes
from fulltilt.report.summary import count

if TYPE_CHECKING:
    from fulltilt.hardware import WslReport
    from fulltilt.records import Machine, Roof


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-roofs", action="store_true", help="do not measure matmul and memory copy (saves seconds)")
    parser.add_argument("--device", metavar="auto|cuda|cpu", default="auto", help="the device whose roofs to measure")
    parser.add_argument("--json", metavar="F", help="write it as JSON (- for stdout)")


def run(args: argparse.Namespace) -> int:
    import dataclasses

    from fulltilt.hardware import RealNvml, read_machine, read_wsl, resolve_device
    from fulltilt.records import VERSION, encode

    nvml = RealNvml()
    machine, wsl = read_machine(nvml=nvml), read_wsl(nvml)
    nvml.close()
    device = resolve_device(args.device)
    if not args.no_roofs:
        from fulltilt.measure import measure_roofs

        with build_console(to_stderr=True).status(f"measuring the roofs of {device}"):
            machine = dataclasses.replace(machine, roofs=measure_roofs(device))
    write_json(args.json, {"version": VERSION, **encode(machine), "wsl": encode(wsl)})
    if args.json != "-":
        _print_machine(machine, wsl)
    return 0


def _print_machine(machine: Machine, wsl: WslReport | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    limit = f", limited to {format_bytes(machine.memory_limit_bytes)}" if machine.memory_limit_bytes else ""
    rows = {
        "system": machine.system + (" (WSL2)" if machine.is_wsl else ""),
        "cores": f"{machine.n_cores_usable} usable of {machine.n_cores_logical} logical, "
        f"{machine.n_cores_physical or 'unknown number of'} physical",
        "memory": f"{format_bytes(machine.memory_total_bytes)}, "
        f"{format_bytes(machine.memory_available_bytes)} available{limit}",
        "/dev/shm": format_bytes(machine.shm_total_bytes) if machine.shm_total_bytes is not None else "none",
        "python": machine.python,
        "packages": ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
    }
    for device in machine.devices:
        free = f", {format_bytes(device.memory_free_bytes)} free" if device.memory_free_bytes is not None else ""
        total = format_bytes(device.memory_total_bytes) if device.memory_total_bytes is not None else "memory unknown"
        rows[f"GPU {device.index}"] = f"{device.name}, {total}{free}, driver {device.driver or 'unknown'}"
    rows |= {f"roof: {roof.name}": _describe_roof(roof) for roof in machine.roofs}
    rows |= {f"not read: {name}": reason for name, reason in machine.null_reasons.items()}
    for name, text in (*rows.items(), *list_wsl_rows(wsl)):
        table.add_row(name, text)
    console = build_console(is_screen=True)
    print_result(console, describe_machine(machine), style="bold")
    console.print(table)


def describe_machine(machine: Machine) -> str:
    """Say in one sentence what there is to train on."""
    gpus = Counter(f"{device.name} GPU" for device in machine.devices)
    found = " and ".join(f"{n} × {name}" for name, n in gpus.items()) or "no GPU"
    cores = f"{count(machine.n_cores_usable, 'usable core')} ({machine.cpu_model})"
    memory = format_bytes(machine.memory_limit_bytes or machine.memory_total_bytes)
    return f"This machine has {found}, {cores} and {memory} of memory."


def list_wsl_rows(wsl: WslReport | None) -> list[tuple[str, str]]:
    """Return what the table says under WSL; nothing elsewhere."""
    if wsl is None:
        return []
    limits = f"memory={wsl.config_memory or 'not set'}, swap={wsl.config_swap or 'not set'} in {wsl.config_path}"
    seen = f"{format_bytes(wsl.memory_total_bytes)} memory, {format_bytes(wsl.swap_total_bytes)} swap"
    return [
        (f"WSL {wsl.version}", f"{seen}; {limits if wsl.config_path else 'no .wslconfig found'}"),
        ("WSL: GPU", f"not usable: {wsl.gpu}" if wsl.gpu else "usable"),
        *(("WSL: advice", text) for text in wsl.advice),
    ]


def _describe_roof(roof: Roof) -> str:
    unit = {"tflops": "TFLOP/s", "gib_per_s": "GiB/s"}[roof.unit]
    low, high = roof.measured_ci95
    text = f"{roof.measured:.3g} {unit} measured ({low:.3g} to {high:.3g})"
    if roof.nominal:
        share_pct = 100 * roof.measured / roof.nominal
        text += f"; {roof.nominal:.4g} nominal ({roof.nominal_source}), {share_pct:.0f} % of it"
    return text
