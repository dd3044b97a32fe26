"""Draw docs/images/tune.svg, the picture in the README, from the recorded result of a search.

It is this program's output on a real result, not a drawing of one: ``fulltilt tune`` on the CIFAR-10 images and two
cores, nothing else running. ``RESULT`` is the tune.json that it wrote.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from fulltilt.report.verdict import WIDTH, build_screen

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "recordings" / "tune-cifar10-cpu.json"
COMMAND, CONFIG = "fulltilt tune configs/cifar10.yaml --data-path cifar10_jpeg.tar.xz", "configs/cifar10.yaml"
PICTURE = ROOT / "docs" / "images" / "tune.svg"


def draw_picture() -> str:
    """Draw the screen that the search ended with."""
    document = json.loads(RESULT.read_text("utf-8"))
    files = f"{document['folder']}/report.html, tune.json, trials.csv"
    first, *rest = build_screen(document, files=files, apply=f"{COMMAND} --apply {CONFIG}")
    console = Console(record=True, width=WIDTH + 2, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(f"$ {COMMAND}", style="dim", markup=False)
    console.print(f"\n{first}", style="bold", markup=False)
    for line in rest:
        console.print(line, markup=False)
    picture = console.export_svg(title="fulltilt tune", theme=MONOKAI, font_aspect_ratio=0.61)
    # A picture in a repository fetches nothing: the reader's own monospace font serves.
    return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S)


if __name__ == "__main__":
    PICTURE.write_text(draw_picture(), "utf-8")
