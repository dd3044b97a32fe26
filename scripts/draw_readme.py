"""Draw docs/images/tune.svg from a result: ``python scripts/draw_readme.py runs/tune/digits/tune.json``.

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

from fulltilt.cli.tune import print_result

TARGET = Path(__file__).parents[1] / "docs" / "images" / "tune.svg"


def main(source: str) -> None:
    document = json.loads(Path(source).read_text())
    console = Console(record=True, width=170, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print("$ fulltilt tune configs/digits.yaml", style="dim")
    print_result(console, document)
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    picture = console.export_svg(title="fulltilt tune", theme=MONOKAI, font_aspect_ratio=0.61)
    # A picture in a repository fetches nothing: the reader's own monospace font serves.
    TARGET.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.S))


if __name__ == "__main__":
    main(sys.argv[1])
