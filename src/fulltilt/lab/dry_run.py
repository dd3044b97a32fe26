"""Check a grid before it is queued, so that a mistake is told once and not by every training."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fulltilt.errors import ConfigError
from fulltilt.hardware.proctree import build_death_wish
from fulltilt.lab.executors.local import Slot
from fulltilt.lab.points import Grid, list_dry_runs, write_words
from fulltilt.lab.records import Point
from fulltilt.lab.scheduling.ends import read_document

CHECK = (sys.executable, "-m", "fulltilt", "check")


def run_dry(
    grid: Grid, new: Sequence[Point], overrides: Sequence[str], slot: Slot, lab: Path, *, tell: Callable[[str], None]
) -> None:
    """Take one training step with each component that the ``new`` points name.

    Raises:
        ConfigError: with the message of ``fulltilt check``.
    """
    points = list(list_dry_runs(new))
    for index, point in enumerate(points):
        tell(f"dry run {index + 1} of {len(points)}: everything is built, and one step taken")
        words = [*overrides, *write_words(point.values)]
        command = [*CHECK, str(grid.source), *words, f"run.device={slot.device}", "--out", str(lab)]
        if problems := _find_problems(command, slot):
            said = " ".join(f"{key}={value}" for key, value in point.values.items())
            where = f"; found by a dry run with {said}, and nothing was queued" if said else ""
            raise ConfigError(f"{'; '.join(problems)}{where}")


def _find_problems(command: Sequence[str], slot: Slot) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "check.json"
        done = subprocess.run(
            [*command, "--json", str(path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, **slot.environ},
            preexec_fn=build_death_wish(os.getpid()),
        )
        found = read_document(path) or {}
    if done.returncode == 0:
        return []
    problems = [item["text"] for item in found.get("items", ()) if item["verdict"] == "problem"]
    return problems or [found.get("error") or done.stderr.strip() or f"fulltilt check ended with {done.returncode}"]
