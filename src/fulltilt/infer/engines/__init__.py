"""What executes a model: one file an engine, each with ``build`` and ``load``.

``build(model, plan, folder)`` writes the engine's files, ``load(folder, manifest, plan)`` opens them as a ``Runner``.
``PACKAGES`` are those whose versions the files belong to. ``onnx`` is imported, and loads, without torch.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fulltilt.infer.joining import Sample
from fulltilt.infer.manifest import Manifest

if TYPE_CHECKING:
    from fulltilt.infer.model import InferenceModel


class Runner(Protocol):
    """A model ready to answer.

    Attributes:
        n_builds: Graphs that were compiled or recorded so far.
        n_graph_runs: How often a compiled graph ran; None: the engine has none.
    """

    @property
    def n_builds(self) -> int: ...

    @property
    def n_graph_runs(self) -> int | None: ...

    def __call__(self, inputs: Sample) -> Sample:
        """Answer arrays, batch first, with arrays, batch first. Waits for the device."""
        ...

    def read_levers(self) -> dict[str, Any]:
        """Read the levers in force back, as far as the engine shows them."""
        ...

    def list_operators(self, inputs: Sample) -> tuple[str, ...]:
        """List what runs for ``inputs``, by the profiler of the engine."""
        ...


class Engine(Protocol):
    PACKAGES: tuple[str, ...]

    def build(self, model: "InferenceModel", plan: Mapping[str, Any], folder: Path) -> None: ...

    def load(self, folder: Path, manifest: Manifest, plan: Mapping[str, Any]) -> Runner: ...


def find_engine(name: str) -> Engine:
    """Import the engine of a plan."""
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]
