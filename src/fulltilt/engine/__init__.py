"""The training engine: a configuration and a plan become a run, a run takes steps, is measured or trained.

Names load on first use. ``train`` is in ``fulltilt.engine.train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

if TYPE_CHECKING:
    from fulltilt.engine.assemble import build_workload
    from fulltilt.engine.build import build_run
    from fulltilt.engine.facts import read_facts, resolve_plan
    from fulltilt.engine.measured import run_measured
    from fulltilt.engine.optimizers import OPTIMIZERS
    from fulltilt.engine.run import Run
    from fulltilt.engine.step import StepOutcome, TrainStep

__all__ = [
    "OPTIMIZERS",
    "Run",
    "StepOutcome",
    "TrainStep",
    "build_run",
    "build_workload",
    "read_facts",
    "resolve_plan",
    "run_measured",
]

_HOMES = {
    "assemble": ("build_workload",),
    "build": ("build_run",),
    "facts": ("read_facts", "resolve_plan"),
    "measured": ("run_measured",),
    "optimizers": ("OPTIMIZERS",),
    "run": ("Run",),
    "step": ("StepOutcome", "TrainStep"),
}

__getattr__, __dir__ = load_on_use(__name__, _HOMES)
