"""Observe the steps of a foreign training script from inside it, and write a report.

Standard library only, Python 3.9 and torch 2.1 or newer; fulltilt is not imported, as the script's Python may lack it.
Any failure in here switches the observer off and leaves the script alone.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import sys
from _thread import get_ident


def start(session: str) -> None:
    """Attach the observer once torch is imported; ``session`` is JSON with its folder and options."""
    sys.meta_path.insert(0, _TorchFinder(json.loads(session)))


class _TorchFinder(importlib.abc.MetaPathFinder):
    """Attaches the observer as soon as the script has imported torch; to look for torch is not to import it."""

    def __init__(self, session):
        self._session = session
        self._asking = set()  # threads that ask the other finders

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or get_ident() in self._asking:
            return None
        self._asking.add(get_ident())
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.discard(get_ident())
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_attach(module):
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _attach(self._session)

        spec.loader.exec_module = run_and_attach
        return spec


def _attach(session):
    try:
        from .observer import Observer

        observer = Observer(session)
        try:
            observer.attach()
        except Exception:
            observer.thread = None  # wrappers that are in place pass every call on
            raise
    except Exception as error:  # an error of the observer must never reach the script
        sys.stderr.write(f"fulltilt doctor: this process is not watched: {type(error).__name__}: {error}\n")
