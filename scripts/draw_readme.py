"""Draw docs/images/tune.svg from a result: ``python scripts/draw_readme.py RESULT.json fulltilt tune CONFIG …``.

The picture in the README is this program's output on a real result, not a drawing of one.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from fulltilt.report.verdict import WIDTH, build_screen

TARGET = Path(__file__).parents[1] / "docs" / "images" / "tune.svg"


def main(source: str, *command: str) -> None:
    """Draw the screen that ``command``, which made the result, ended with."""
    document = json.loads(Path(source).read_text())
    typed, config = " ".join(command), next(word for word in command if word.endswith(".yaml"))
    files = f"{Path(source).parent}/report.html, tune.json, trials.csv"
    first, *rest = build_screen(document, files=files, apply=f"{typed} --apply {config}")
    console = Console(record=True, width=WIDTH + 2, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(f"$ {typed}", style="dim", markup=False)
    console.print(f"\n{first}", style="bold", markup=False)
    for line in rest:
        console.print(line, markup=False)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(title="fulltilt tune", theme=MONOKAI, font_aspect_ratio=0.61)
    # A picture in a repository fetches nothing: the reader's own monospace font serves.
    TARGET.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S))


if __name__ == "__main__":
    main(*sys.argv[1:])
