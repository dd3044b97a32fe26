"""Write all rows of a search as CSV, for a spreadsheet: one line a trial, one column a lever and a figure."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from fulltilt.levers import load_catalogue
from fulltilt.records import PHASES
from fulltilt.report.summary import Document, name_picks
from fulltilt.report.table import is_busy

FIGURES = (
    "gpu_utilization_pct", "memory_allocated_peak_gib", "memory_reserved_peak_gib",
    "memory_rss_peak_gib", "memory_peak_part", "first_step_s", "receive_ms", "flops_per_sample", "flops_coverage_pct",
    "cpu_pressure_pct", "steal_pct", "n_steps", "seconds",
)  # fmt: skip


def build_trials_csv(document: Document) -> str:
    """Build the lines of every row, repeats and probes included, in the order they ran.

    An empty cell is a figure that was not read; why is in the JSON under ``null_reasons``. ``picked`` names the picks.
    """
    rows = [*document["trials"], *document.get("repeats", ()), *document.get("probes", ())]
    unique = {row["id"]: row for row in (*rows, document.get("baseline")) if row}
    picked = name_picks(document)
    stream = io.StringIO()
    writer = csv.DictWriter(
        stream, fieldnames=list(_build_line({"id": "", "plan": {}, "status": ""}, [])), lineterminator="\n"
    )
    writer.writeheader()
    for id in sorted(unique, key=lambda id: (len(id), id)):
        writer.writerow(_build_line(unique[id], picked.get(id, [])))
    return stream.getvalue()


def _build_line(row: Mapping[str, Any], picks: list[str]) -> dict[str, Any]:
    phases, interval = row.get("phases_ms") or {}, row.get("samples_per_s_ci95") or (None, None)
    return {
        "id": row["id"],
        "kind": row.get("kind", ""),
        "status": row["status"],
        "picked": " ".join(picks),
        **{name: row["plan"].get(name) for name in load_catalogue()},
        "effective_batch_size": row.get("effective_batch_size"),
        **{f"{phase}_ms": phases.get(phase) for phase in (*PHASES, "step")},
        "samples_per_s": row.get("samples_per_s"),
        "samples_per_s_low": interval[0],
        "samples_per_s_high": interval[1],
        **{name: row.get(name) for name in FIGURES},
        "busy_machine": "yes" if is_busy(row) else "",
        "notes": "; ".join(row.get("notes") or ()),
        "why": row.get("why"),
        "reason": row.get("reason"),
    }
