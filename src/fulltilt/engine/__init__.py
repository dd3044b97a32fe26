"""The training engine: a configuration and a plan become a run, a run takes steps, is measured or trained.

Names load on first use. ``train`` is in ``fulltilt.engine.train``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulltilt.engine.assemble import build_workload
    from fulltilt.engine.build import Run, build_run
    from fulltilt.engine.facts import read_facts, resolve_plan
    from fulltilt.engine.measured import run_measured
    from fulltilt.engine.optimizers import OPTIMIZERS
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

_HOME_OF = {
    "OPTIMIZERS": "optimizers",
    "Run": "build",
    "StepOutcome": "step",
    "TrainStep": "step",
    "build_run": "build",
    "build_workload": "assemble",
    "read_facts": "facts",
    "resolve_plan": "facts",
    "run_measured": "measured",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
