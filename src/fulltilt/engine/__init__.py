"""The training engine: a configuration and a plan become a run, a run takes steps, is measured or trained.

Names load on first use. ``train`` is in ``fulltilt.engine.loop.train``.
"""

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

# ruff: noqa: F401

if TYPE_CHECKING:
    from fulltilt.engine.build.assemble import build_workload
    from fulltilt.engine.build.builder import build_run

__getattr__, __dir__ = load_on_use(__name__, __file__)
