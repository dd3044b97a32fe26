"""``fulltilt train --profile-steps N``: the operators of a step, costliest first; nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fulltilt.cli._shared import build_console, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from fulltilt.config import Config
    from fulltilt.engine.measured.step_profile import StepProfile

N_ROWS = 20


def run_profile(config: Config, *, n_steps: int, out: str | None, json_to: str | None) -> int:
    """Profile steps and print what they are made of; the exit code."""
    from fulltilt.engine.build.assemble import name_run
    from fulltilt.engine.build.builder import check_device
    from fulltilt.engine.measured.step_profile import profile_steps
    from fulltilt.engine.ranks.world import plan_devices
    from fulltilt.records import VERSION, dumps

    devices = plan_devices(config)
    out_dir = Path(out or Path("runs") / "train" / name_run(config)) / "profile"
    profile = profile_steps(config, device=check_device(devices[0]), n_steps=n_steps, out_dir=out_dir)
    if json_to:
        write_json(json_to, dumps({"version": VERSION, "config": config.source, "profile": profile}, indent=1))
    console = build_console(to_stderr=json_to == "-")
    console.print(_build_table(profile))
    if len(devices) > 1:
        text = f"one process on {profile.device} took whole batches; training would divide them over {len(devices)}"
        console.print(text, markup=False)
    console.print(f"trace, for ui.perfetto.dev: {profile.trace_path}", markup=False)
    memory = profile.snapshot_path or "none: only the CUDA allocator records one"
    console.print(f"memory snapshot, for pytorch.org/memory_viz: {memory}", markup=False)
    return 0


def _build_table(profile: StepProfile) -> Table:
    from rich.table import Table

    title = f"operators of {profile.n_steps} steps on {profile.device}, without what they call"
    table = Table("operator", "calls a step", "CPU ms a step", "device ms a step", "share", title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for operator in profile.operators[:N_ROWS]:
        device_ms = operator.device_ms_per_step
        table.add_row(
            operator.name,
            f"{operator.calls_per_step:.1f}",
            f"{operator.cpu_ms_per_step:.3f}",
            "" if device_ms is None else f"{device_ms:.3f}",
            f"{operator.share_pct:.1f} %",
        )
    return table
