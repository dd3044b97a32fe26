"""aot: the model exported once and compiled ahead of time by AOTInductor, to a package. Imports torch."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt.infer.engines._torch import TorchRunner, apply_levers, plan_export
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import InferenceModel
from fulltilt.levers import Setup, load_inference_catalogue

FILE = "model.pt2"


def build(model: InferenceModel, plan: Mapping[str, Any], folder: Path) -> None:
    """Export for every batch and length up to the declared ones, and compile; 10 to 50 s."""
    setup = apply_levers(copy.deepcopy(model.module), plan, model.device)
    traced, dynamic = plan_export(model)
    with torch.no_grad():
        program = torch.export.export(setup.model, traced, dynamic_shapes=dynamic)
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE))


def load(folder: Path, manifest: Manifest) -> TorchRunner:
    device = torch.device(manifest.device)
    load_inference_catalogue()["threads"].apply(Setup(device=device), manifest.plan["threads"])
    package = torch._inductor.aoti_load_package(str(folder / FILE))
    return TorchRunner(lambda *inputs: tuple(package(*inputs)), device, manifest)
