"""aot: the model exported once and compiled ahead of time by AOTInductor, to a package. Imports torch."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt.infer.engines._torch import (
    TorchRunner,
    apply_levers,
    build_example,
    encode_levers,
    list_dynamic_dims,
)
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import InferenceModel
from fulltilt.levers import Setup, load_inference_catalogue

PACKAGES = ("torch",)
FILE, LEVERS = "model.pt2", "fulltilt_levers"


def build(model: InferenceModel, plan: Mapping[str, Any], folder: Path) -> None:
    """Export for every batch and length up to the declared ones, and compile; 10 to 50 s."""
    setup = apply_levers(copy.deepcopy(model.module), plan, model.device)
    with torch.no_grad():
        program = torch.export.export(
            setup.model, build_example(model), dynamic_shapes={"inputs": list_dynamic_dims(model)[0]}
        )
        metadata = {"aot_inductor.metadata": {LEVERS: encode_levers(setup)}}
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / FILE), inductor_configs=metadata)


def load(folder: Path, manifest: Manifest, plan: Mapping[str, Any]) -> TorchRunner:
    package = torch._inductor.aoti_load_package(str(folder / FILE))
    setup = Setup(device=torch.device(manifest.device))
    load_inference_catalogue()["threads"].apply(setup, plan["threads"])

    class Runner(TorchRunner):
        def read_levers(self) -> dict[str, Any]:
            threads = load_inference_catalogue()["threads"].observe(setup)
            return json.loads(package.get_metadata()[LEVERS]) | {"threads": threads}

    return Runner(lambda *inputs: tuple(package(*inputs)), setup)
