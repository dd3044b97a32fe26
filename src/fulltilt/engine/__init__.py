"""The training engine: a configuration and a plan become a run, a run takes steps, is measured or trained.

Names load on first use. ``train`` is in ``fulltilt.engine.loop.train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

if TYPE_CHECKING:
    from fulltilt.engine.build.assemble import build_workload
    from fulltilt.engine.build.builder import build_run

__all__ = ["build_run", "build_workload"]

_HOMES = {"build.assemble": ("build_workload",), "build.builder": ("build_run",)}

__getattr__, __dir__ = load_on_use(__name__, _HOMES)
