"""``fulltilt.tune``: the search of ``fulltilt.tuner``, which shows in a notebook how far it is."""

import functools
import importlib
import io
from typing import Any

from rich.console import Console

from fulltilt.cli._live import LiveTable
from fulltilt.tuner import tuning
from fulltilt.tuner.search.progress import OnEvent, SearchEvent

WIDTH, HEIGHT = 115, 32
PRE = '<pre style="margin:0;line-height:1.3;font-family:monospace">{code}</pre>'


@functools.wraps(tuning.tune)
def tune(*args: Any, **options: Any) -> Any:
    if options.get("on_event") or not Console().is_jupyter:
        return tuning.tune(*args, **options)
    view, close = open_view()
    try:
        return tuning.tune(*args, **options | {"on_event": view})
    finally:
        close()


def open_view() -> tuple[OnEvent, Any]:
    """Open the table of a search below a cell, and return what takes its events and what clears it.

    Each event draws it anew: a timer would need a thread that the search is measured beside.
    """
    ipython = importlib.import_module("IPython.display")  # is there, where a notebook's kernel runs this
    handle = ipython.display(ipython.HTML(""), display_id=True)
    table = LiveTable(Console(width=WIDTH, height=HEIGHT))

    def view(event: SearchEvent) -> None:
        table(event)
        console = Console(file=io.StringIO(), record=True, width=WIDTH, force_jupyter=False)
        console.print(table.build_frame())
        handle.update(ipython.HTML(console.export_html(inline_styles=True, code_format=PRE)))

    return view, lambda: handle.update(ipython.HTML(""))
