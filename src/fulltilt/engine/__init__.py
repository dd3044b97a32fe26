"""The training engine: a configuration and a plan become a run, a run takes steps, is measured or trained.

Names load on first use. ``train`` is in ``fulltilt.engine.loop.train``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

if TYPE_CHECKING:
    from fulltilt.engine.build.assemble import build_workload
    from fulltilt.engine.build.builder import build_run
    from fulltilt.engine.build.facts import read_facts, resolve_plan
    from fulltilt.engine.build.optimizers import OPTIMIZERS
    from fulltilt.engine.build.run import Run
    from fulltilt.engine.measured.measurement import run_measured
    from fulltilt.engine.step.train_step import StepOutcome, TrainStep

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
    "build.assemble": ("build_workload",),
    "build.builder": ("build_run",),
    "build.facts": ("read_facts", "resolve_plan"),
    "measured.measurement": ("run_measured",),
    "build.optimizers": ("OPTIMIZERS",),
    "build.run": ("Run",),
    "step.train_step": ("StepOutcome", "TrainStep"),
}

__getattr__, __dir__ = load_on_use(__name__, _HOMES)
