"""eager: the model as it is, operator by operator; what every other engine falls back to. Imports torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt.infer.engines._torch import TorchRunner, apply_levers, rebuild_module
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import InferenceModel

PACKAGES = ("torch",)


def build(model: InferenceModel, plan: Mapping[str, Any], folder: Path) -> None:
    """Write nothing: the weights of every artefact and its configuration are all that eager needs."""


def load(folder: Path, manifest: Manifest, plan: Mapping[str, Any]) -> TorchRunner:
    setup = apply_levers(rebuild_module(folder, manifest), plan, torch.device(manifest.device))
    return TorchRunner(setup.model, setup)
