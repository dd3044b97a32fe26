"""What executes a model: one file an engine.

``build(model, plan, folder)`` writes an engine's files, ``model.*``; eager and compile have none: weights and
configuration are all that they need. ``load(folder, manifest)`` opens an artefact. ``onnx`` loads without torch.
"""

import importlib
from types import ModuleType
from typing import Protocol

from fulltilt.infer.joining import Sample

WEIGHTS = "weights.pt"  # in fp32, of every artefact


class Runner(Protocol):
    """A model ready to answer."""

    def __call__(self, inputs: Sample) -> Sample:
        """Answer arrays, batch first, with arrays, batch first. Waits for the device."""
        ...

    def list_operators(self, inputs: Sample) -> tuple[str, ...]:
        """List what runs for ``inputs``, by the profiler of the engine."""
        ...

    def count_graphs(self) -> tuple[int, int | None]:
        """Count the graphs that were compiled or recorded so far, and their runs; None: the engine has none."""
        return 0, None


def find_engine(name: str) -> ModuleType:
    """Import the engine of a plan."""
    return importlib.import_module(f"{__name__}.{name}")
