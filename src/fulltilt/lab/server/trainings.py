"""Show what a training has logged: curves, the parts of a step, its machine, its files."""

from collections.abc import Mapping, Sequence
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.lab.lab import Lab, find_out_dir, find_stream, open_stream
from fulltilt.lab.listing import read_newest_events, read_numbers
from fulltilt.lab.records import Artefact, Attempt, Experiment
from fulltilt.lab.runner.shipping import CHECKPOINTS
from fulltilt.records import format_bytes
from fulltilt.report.charts import Bar, build_bar_chart
from fulltilt.report.training import TrainingRun, read_training_lines
from fulltilt.report.tune_charts import PHASE_COLOURS

MOST_EVENT_BYTES = 16 << 20  # of an attempt's events that curves are drawn of
LOG_TAIL_BYTES = 256 << 10  # of a log that a page begins with


def read_run(lab: Lab, id: str, n_attempts: int) -> TrainingRun | None:
    """Read what the attempts at an experiment logged, as one training; None before its first step."""
    lines: list[str] = []
    for number in range(1, n_attempts + 1):
        try:
            with open_stream(lab.folder, Attempt(experiment=id, number=number), "events.jsonl") as stream:
                lines += stream.read(MOST_EVENT_BYTES).decode(errors="replace").split("\n")[:-1]
        except OSError:
            continue
    try:
        return read_training_lines(id, lines)
    except UsageError:
        return None


def read_phases(lab: Lab, attempt: Attempt) -> tuple[dict[str, float], int]:
    """Return the mean milliseconds of each part of a step, and how many steps were logged."""
    lines = read_newest_events(lab.folder, attempt, "StepsDone")
    steps = [phases for line in lines if (phases := read_numbers(line, "phases_ms"))]
    sums = {name: sum(phases.get(name) or 0.0 for phases in steps) for name in PHASE_COLOURS}
    return {name: ms / len(steps) for name, ms in sums.items() if ms}, len(steps)


def draw_phases(phases: Mapping[str, float], n_steps: int) -> str:
    """Draw the parts of a step as one bar; empty where nothing was logged."""
    if not phases:
        return ""
    bar = Bar(label="a step", figure=f"{sum(phases.values()):.3g} ms", parts=phases)
    said = "the last step that was logged" if n_steps == 1 else f"mean of the last {n_steps} steps that were logged"
    return build_bar_chart([bar], x_title=f"ms, {said}", colours={name: PHASE_COLOURS[name] for name in phases})


def describe_phases(phases: Mapping[str, float]) -> str:
    whole = sum(phases.values())
    shares = {name: f"{100 * ms / whole:.0f} %" if ms > 0.005 * whole else "below 1 %" for name, ms in phases.items()}
    return ", ".join(f"{name.replace('_', ' ')} {ms:.3g} ms ({shares[name]})" for name, ms in phases.items())


def list_environment(lab: Lab, found: Experiment, run: TrainingRun | None) -> list[tuple[str, str]]:
    """List what the newest attempt runs on, and where it came from."""
    work = lab.store.read_work(found.id)
    name = found.node or found.last_node
    node = next((each for each in lab.store.read_nodes() if each.name == name), None)
    threads = f", {found.n_threads} thread{'s' * (found.n_threads > 1)}" if found.n_threads else ""
    said = {
        "machine": f"{name}: {', '.join(found.devices)}{threads}" if name and found.devices else name,
        "engine": found.engine,
        "versions": node and ", ".join(f"{each} {version}" for each, version in node.versions.items()),
        "training": run and "\n".join(run.started.get("report") or ()),
        "notes": run and "\n".join(run.notes),
        "submitted": f"{work.source}{f' by {found.owner}' if found.owner else ''}",
        "code": work.code and f"snapshot {work.code.digest[:12]}",
        "folder": str(find_out_dir(lab.folder, found.id)),
    }
    return [(key, text) for key, text in said.items() if text]


def list_files(artefacts: Sequence[Artefact]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (files of the result, checkpoints), newest attempt first, with their sizes in words."""
    rows = [
        {"name": each.name, "attempt": each.attempt, "size": format_bytes(each.n_bytes), "time_s": each.time_s}
        for each in artefacts
    ]
    checkpoints = [row for row in rows if row["name"] == CHECKPOINTS[0]]
    return [row for row in rows if row["name"] not in CHECKPOINTS], checkpoints


def find_log_start(lab: Lab, attempt: Attempt) -> int:
    """Return the place in a log from which a page shows it: its last part, where it is long."""
    try:
        return max(0, find_stream(lab.folder, attempt, "log.txt").stat().st_size - LOG_TAIL_BYTES)
    except OSError:
        return 0
