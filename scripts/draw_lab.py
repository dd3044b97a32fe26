"""Draw docs/images/lab-*.png: ``python scripts/draw_lab.py``, with Chromium and fulltilt[lab,digits] installed.

The pictures are of a real server on this machine, with two devices and the six trainings of configs/parallel_grid.yaml.
They show the folder of the lab: ``/srv/lab``, which must not be there, and which whoever runs this may make.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chromium import Page, start_chromium
from PIL import Image

from fulltilt.lab.client import Client
from fulltilt.lab.serving import find_server

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH, SCALE = 1180, 1.5
PATIENCE_S = 600.0
N_COLOURS = 96  # of a picture of text and lines: nobody sees that there are no more
FOLDER = Path("/srv/lab")
FULLTILT = (sys.executable, "-m", "fulltilt", "lab")


def main() -> None:
    """Run the lab, and take a picture of its queue, of an experiment and of a comparison."""
    FOLDER.mkdir()
    serve = [*FULLTILT, "serve", "--lab", str(FOLDER), "--port", "0", "--devices", "0,1"]
    server = subprocess.Popen(serve, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: find_server(FOLDER))
        words = ["submit", str(ROOT / "configs" / "parallel_grid.yaml"), "epochs=8", "--lab", str(FOLDER)]
        subprocess.run([*FULLTILT, *words], check=True, stdout=subprocess.DEVNULL)
        scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with scratch, start_chromium(Path(scratch.name) / "profile") as browser:
            _draw(browser.open())
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(FOLDER)


def _draw(page: Page) -> None:
    address = find_server(FOLDER)
    assert address is not None
    client = Client(None, address)
    page.show_as(width=WIDTH, height=460, scale=SCALE)
    page.go(f"{address.url}/login#{address.token}")
    page.wait("location.pathname === '/' && document.readyState === 'complete'")
    page.go(f"{address.url}/queue")
    page.wait(
        "[...document.querySelectorAll('tr:has(.running)')].filter((row) => row.innerText.includes('loss')).length"
        " === 2 && document.querySelectorAll('tr .succeeded').length >= 2",
        patience_s=PATIENCE_S,
    )
    _save(page, "queue", until="document.querySelector('table').getBoundingClientRect().bottom")
    _wait(lambda: client.get("/api/status")["states"].get("succeeded") == 6)
    page.show_as(width=WIDTH, height=1900, scale=SCALE)
    page.go(f"{address.url}/experiments/e5")
    page.wait("/epoch 8/.test(document.getElementById('log').textContent)")
    _save(page, "experiment", until="document.getElementById('log').getBoundingClientRect().bottom")
    page.go(f"{address.url}/compare?" + "&".join(f"id=e{number}" for number in range(1, 7)))
    page.evaluate(
        "[...document.querySelectorAll('.sortable th button')].find((each) => each.innerText === 'loss').click()"
    )
    _save(
        page, "compare", until="document.querySelector('.charts > figure:nth-child(2)').getBoundingClientRect().bottom"
    )


def _save(page: Page, name: str, *, until: str) -> None:
    """Save what is seen, down to a place, in few colours."""
    path = IMAGES / f"lab-{name}.png"
    page.take_picture(path)
    picture = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    bottom = page.evaluate(f"Math.min({until} + 16, window.innerHeight)")
    picture = picture.crop((0, 0, picture.width, round(SCALE * bottom)))
    picture.quantize(N_COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")


def _wait(look: Callable[[], Any]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < until_s
        time.sleep(0.1)


if __name__ == "__main__":
    main()
