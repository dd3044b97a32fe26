"""What pages of several rooms share: their frame, style sheets and libraries."""

import re
from pathlib import Path

import jinja2
from fastapi import HTTPException
from fastapi.responses import FileResponse

import fulltilt.report

ASSET = re.compile(r"[a-z0-9.-]+\.(css|js|txt)")
TYPES = {".css": "text/css", ".js": "text/javascript", ".txt": "text/plain"}
HERE = Path(__file__).parent / "static"
TEMPLATES = Path(__file__).parent / "templates"
CHARTS = Path(fulltilt.report.__file__).parent / "page.css"


def build_environment(folder: Path) -> jinja2.Environment:
    """Build what reads the templates of a room, and ``frame.html``, which they extend."""
    loader = jinja2.FileSystemLoader([folder, TEMPLATES])
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def answer_asset(name: str, *, own: Path | None = None) -> FileResponse:
    """Answer with a file of ``vendor/``, one that all pages share, or one of the folder ``own``.

    Raises:
        HTTPException: there is no such file.
    """
    folder, _, file = name.rpartition("/")
    if folder not in ("", "vendor") or not ASSET.fullmatch(file):
        raise HTTPException(404, "there is no such file")
    places = [CHARTS] if name == "charts.css" else [HERE / name, *([own / name] if own else [])]
    for path in places:
        if path.is_file():
            return FileResponse(path, media_type=TYPES[path.suffix], headers={"Cache-Control": "max-age=3600"})
    raise HTTPException(404, "there is no such file")
