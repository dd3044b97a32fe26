"""``fulltilt train --profile-data`` and ``--profile-steps N``: what takes time, costliest first; nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.cli._shared import build_console, print_result, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from fulltilt.config import Config

N_OPERATORS = 20  # of a step, shown
SHAPES_CHARS = 32  # shown; JSON has all


def run_data_profile(config: Config, *, json_to: str | None) -> int:
    """Time the parts of the data path and print them; return the exit code."""
    from fulltilt.data.loading.profile import measure_data_path
    from fulltilt.engine.build.assemble import build_workload
    from fulltilt.engine.build.builder import check_device
    from fulltilt.engine.ranks.world import plan_devices

    profile = measure_data_path(
        build_workload(config).dataset(),
        batch_size=config.data.batch_size,
        device=check_device(plan_devices(config)[0]),
        on_device=config.data.transforms == "device",
        seed=config.run.seed,
    )
    rows = [(p.name, p.where, f"{p.ms_per_sample:.4f}", f"{p.share_pct:.1f} %") for p in profile.parts]
    titles = ("part", "where", "ms a sample", "share")
    title = f"{profile.dataset}, batches of {profile.batch_size}"
    console = _tell(config, profile, json_to, title=title, titles=titles, n_words=2, rows=rows)
    if profile.loader_samples_per_s is not None:
        rate = f"the loader's parts give {profile.loader_samples_per_s:,.0f} samples/s in one process"
        console.print(f"{rate}, {profile.n_samples:,} samples timed")
    if profile.note:
        console.print(profile.note)
    return 0


def run_step_profile(config: Config, *, n_steps: int, out: str | None, json_to: str | None) -> int:
    """Profile the operators of some steps and print them; return the exit code."""
    from fulltilt.engine.build.builder import check_device
    from fulltilt.engine.measured.step_profile import profile_steps
    from fulltilt.engine.ranks.world import plan_devices

    devices = plan_devices(config)
    out_dir = Path(out or Path("runs") / "train" / config.run_name) / "profile"
    profile = profile_steps(config, device=check_device(devices[0]), n_steps=n_steps, out_dir=out_dir)
    rows = [
        (
            operator.name,
            f"{operator.calls_per_step:.1f}",
            f"{operator.cpu_ms_per_step:.3f}",
            "" if operator.device_ms_per_step is None else f"{operator.device_ms_per_step:.3f}",
            f"{operator.mib_per_step:.2f}",
            operator.shapes if len(operator.shapes) <= SHAPES_CHARS else f"{operator.shapes[: SHAPES_CHARS - 1]}…",
            f"{operator.share_pct:.1f} %",
        )
        for operator in profile.operators[:N_OPERATORS]
    ]
    titles = ("operator", "calls a step", "CPU ms a step", "device ms a step", "MiB a step", "shapes", "share")
    title = f"operators of {profile.n_steps} steps on {profile.device}, without what they call"
    console = _tell(config, profile, json_to, title=title, titles=titles, n_words=1, rows=rows)
    if len(devices) > 1:
        text = f"one process on {profile.device} took whole batches; training would divide them over {len(devices)}"
        console.print(text)
    console.print(f"trace, for ui.perfetto.dev: {profile.trace_path}")
    memory = profile.snapshot_path or "none: only the CUDA allocator records one"
    console.print(f"memory snapshot, for pytorch.org/memory_viz: {memory}")
    return 0


def _tell(
    config: Config,
    profile: Any,
    json_to: str | None,
    *,
    title: str,
    titles: Sequence[str],
    n_words: int,
    rows: Sequence[Sequence[str]],
) -> Console:
    """Write the JSON and print the table, whose first ``n_words`` columns hold words and the others figures."""
    from rich.table import Table

    from fulltilt.records import VERSION

    write_json(json_to, {"version": VERSION, "config": config.source, "profile": profile})
    table = Table(*titles, title=title)
    for column in table.columns[n_words:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console = build_console(to_stderr=json_to == "-")
    if rows:
        print_result(console, f"{rows[0][0]} takes most, {rows[0][-1]} ({title}).")
    console.print(table)
    return console
