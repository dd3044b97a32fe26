"""``fulltilt train --profile-data``: what each part of the data path takes, slowest first; nothing is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulltilt.cli._shared import build_console, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from fulltilt.config import Config
    from fulltilt.data.loading.profile import DataProfile


def run_profile(config: Config, *, json_to: str | None) -> int:
    """Time the parts and print them; the exit code."""
    from fulltilt.data.loading.profile import measure_data_path
    from fulltilt.engine.build.assemble import build_workload
    from fulltilt.engine.build.builder import check_device
    from fulltilt.engine.ranks.world import choose_device
    from fulltilt.records import VERSION, dumps

    device = check_device(choose_device(config))
    profile = measure_data_path(
        build_workload(config).dataset(),
        batch_size=config.data.batch_size,
        device=device,
        on_device=config.data.transforms == "device",
        seed=config.run.seed,
    )
    if json_to:
        write_json(json_to, dumps({"version": VERSION, "config": config.source, "profile": profile}, indent=1))
    console = build_console(to_stderr=json_to == "-")
    console.print(_build_table(profile))
    if profile.loader_samples_per_s is not None:
        rate = f"the loader's parts give {profile.loader_samples_per_s:,.0f} samples/s in one process"
        console.print(f"{rate}, {profile.n_samples:,} samples timed", markup=False)
    if profile.note:
        console.print(profile.note, markup=False)
    return 0


def _build_table(profile: DataProfile) -> Table:
    from rich.table import Table

    table = Table("part", "where", "ms a sample", "share", title=f"{profile.dataset}, batches of {profile.batch_size}")
    for column in table.columns[2:]:
        column.justify = "right"
    for part in profile.parts:
        table.add_row(part.name, part.where, f"{part.ms_per_sample:.4f}", f"{part.share_pct:.1f} %")
    return table
