"""What the engines of torch share: the levers applied to a model, and the runner around it. Imports torch."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from fulltilt.config import config_from_values
from fulltilt.engine.build.assemble import build_workload
from fulltilt.errors import PlanObstacleError
from fulltilt.infer.engines import WEIGHTS, Runner
from fulltilt.infer.joining import Sample, join_samples, read_length, read_samples
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import Flat, InferenceModel, build_model
from fulltilt.levers import Setup, load_inference_catalogue
from fulltilt.levers.inference.cuda_graphs import Recorded, list_shapes

N_RECORDED = 8  # samples of a batch, at least, whose shapes are recorded before it answers


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
    """Calls a function of tensors on a device, by recorded graphs where the plan has them."""

    def __init__(self, forward: Callable[..., tuple[Tensor, ...]], device: torch.device, manifest: Manifest):
        self.forward, self._device, self._manifest, self._recorded = forward, device, manifest, None
        self._matmul = "high" if manifest.plan["precision"] == "tf32" else "highest"
        if manifest.plan["cuda_graphs"]:
            pads = [spec.pad if spec.varies else None for spec in manifest.inputs]
            self._recorded = Recorded(forward, pads, manifest.max_length or 1)

    def __call__(self, inputs: Sample) -> Sample:
        torch.set_float32_matmul_precision(self._matmul)  # of the process, in which another artefact may be open
        with torch.no_grad():
            return tuple(tensor.cpu().numpy() for tensor in (self._recorded or self.forward)(*self._send(inputs)))

    def record(self, folder: Path) -> Self:
        """Record the graphs of all shapes that requests will have, where the plan has them."""
        manifest, policy = self._manifest, self._manifest.policy
        if self._recorded:
            sample = self._send(join_samples(read_samples(folder)[:1], manifest.inputs))
            sizes = max(N_RECORDED, policy.max_batch), manifest.max_length or 1, policy.max_tokens or math.inf
            with torch.no_grad():
                for shape in list_shapes(*sizes):
                    self._recorded.record(shape, *sample)
        return self

    def _send(self, inputs: Sample) -> list[Tensor]:
        own = (array if array.flags.writeable else array.copy() for array in inputs)  # torch warns of a request's bytes
        return [torch.from_numpy(array).to(self._device, non_blocking=True) for array in own]

    def count_graphs(self) -> tuple[int, int | None]:
        return len(self._recorded.known) if self._recorded else 0, None

    def list_operators(self, inputs: Sample) -> tuple[str, ...]:
        with torch.profiler.profile() as seen:
            self(inputs)
        return tuple(sorted({event.key for event in seen.key_averages()}))
