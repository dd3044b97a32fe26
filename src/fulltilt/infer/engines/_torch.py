"""What the engines of torch share: the levers applied to a model, and the runner around it. Imports torch."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulltilt.config import config_from_values
from fulltilt.engine.build.assemble import build_workload
from fulltilt.errors import PlanObstacleError
from fulltilt.infer.engines import WEIGHTS, Runner
from fulltilt.infer.joining import Sample, join_samples, read_length
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import Flat, InferenceModel, build_model
from fulltilt.levers import Setup, load_inference_catalogue


def apply_levers(module: nn.Module, plan: Mapping[str, Any], device: torch.device) -> Setup:
    """Apply the levers of inference, in their order, to a module of fp32 that becomes the plan's.

    Raises:
        PlanObstacleError: one was applied and is not in force.
    """
    catalogue = load_inference_catalogue()
    setup = Setup(device=device, model=module.to(device).eval(), state={"engine": plan["engine"]})
    for name, lever in catalogue.items():
        lever.apply(setup, plan[name])
    for name, lever in catalogue.items():
        if plan[name] is not None and (seen := lever.observe(setup)) != plan[name]:
            raise PlanObstacleError(f"{name} {plan[name]} is not in force, {seen} is; leave it as it is")
    return setup


def open_setup(folder: Path, manifest: Manifest) -> Setup:
    """Build the model of an artefact with its plan; on the CPU where its GPU is not there."""
    place = manifest.device if torch.cuda.is_available() else "cpu"
    return apply_levers(rebuild_module(folder, manifest), manifest.plan, torch.device(place))


def rebuild_module(folder: Path, manifest: Manifest) -> Flat:
    """Build the model of an artefact from its configuration, with the weights that lie in it.

    Raises:
        FulltiltError: the user's code is not there, or builds another model. Other errors of it pass through.
    """
    given = manifest.config
    config = config_from_values(given["config"], base_dir=given["base_dir"], provenance=given["provenance"])
    model = build_model(build_workload(config), config)
    flat = Flat(model, [spec.name for spec in manifest.inputs], manifest.takes_mapping)
    flat.load_state_dict(torch.load(folder / WEIGHTS, weights_only=True, map_location="cpu"), assign=True)
    return flat


def plan_export(model: InferenceModel) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Return the batch that an exporter traces, and which dimensions differ between calls, as torch.export has it."""
    longest = max(model.samples, key=lambda sample: read_length(sample, model.inputs))
    joined = join_samples([longest] * 3, model.inputs)  # sizes 0 and 1 are special to it
    traced = tuple(torch.from_numpy(array).to(model.device) for array in joined)
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=2, max=max(3, model.max_length or 0))
    return traced, {"inputs": tuple({0: batch, 1: length} if spec.varies else {0: batch} for spec in model.inputs)}


class TorchRunner(Runner):
    """Calls a function of tensors on a device."""

    def __init__(self, forward: Callable[..., tuple[Tensor, ...]], device: torch.device):
        self.forward, self._device = forward, device

    def __call__(self, inputs: Sample) -> Sample:
        own = (array if array.flags.writeable else array.copy() for array in inputs)  # torch warns of a request's bytes
        with torch.no_grad():
            outputs = self.forward(*(torch.from_numpy(array).to(self._device, non_blocking=True) for array in own))
        return tuple(tensor.cpu().numpy() for tensor in outputs)

    def list_operators(self, inputs: Sample) -> tuple[str, ...]:
        with torch.profiler.profile() as seen:
            self(inputs)
        return tuple(sorted({event.key for event in seen.key_averages()}))
