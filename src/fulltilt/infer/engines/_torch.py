"""What the engines of torch share: the levers applied to a model, and the runner around it. Imports torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulltilt.config import config_from_values
from fulltilt.engine.build.assemble import build_workload
from fulltilt.infer.joining import Sample, join_samples
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import Flat, InferenceModel, build_model
from fulltilt.levers import Setup, load_inference_catalogue

WEIGHTS = "weights.pt"
Forward = Callable[..., tuple[Tensor, ...]]


def apply_levers(module: nn.Module, plan: Mapping[str, Any], device: torch.device) -> Setup:
    """Apply the levers of inference, in their order, to a module of fp32 that becomes the plan's."""
    setup = Setup(device=device, model=module.to(device).eval(), state={"engine": plan["engine"]})
    for name, lever in load_inference_catalogue().items():
        lever.apply(setup, plan[name])
    setup.forward = setup.model
    return setup


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


def build_example(model: InferenceModel, n: int = 3) -> tuple[Tensor, ...]:
    """Join real samples to the batch that an exporter traces. Sizes 0 and 1 are special to it."""
    chosen = [model.samples[i % len(model.samples)] for i in range(n)]
    if model.joins == "alone":
        chosen = chosen[:1] * n
    return tuple(torch.from_numpy(array).to(model.device) for array in join_samples(chosen, model.inputs))


def list_dynamic_dims(model: InferenceModel) -> tuple[Any, ...]:
    """List the dimensions of every input that differ between calls, in the form that ``torch.export`` takes."""
    batch = torch.export.Dim("batch", min=1)
    length = torch.export.Dim("length", min=2, max=max(3, model.max_length or 0))
    return (tuple({0: batch, 1: length} if spec.varies else {0: batch} for spec in model.inputs),)


class TorchRunner:
    """Calls a function of tensors, and counts what its compiler built."""

    def __init__(self, forward: Forward, setup: Setup, *, graphs: Any = None, builds: Callable[[], int] = lambda: 0):
        self._forward, self._setup, self._graphs, self._builds = forward, setup, graphs, builds

    @property
    def n_builds(self) -> int:
        return self._builds()

    @property
    def n_graph_runs(self) -> int | None:
        return None if self._graphs is None else self._graphs.n_runs

    def __call__(self, inputs: Sample) -> Sample:
        with torch.no_grad():
            outputs = self._forward(*(self._place(array) for array in inputs))
        return tuple(tensor.cpu().numpy() for tensor in outputs)

    def _place(self, array: np.ndarray) -> Tensor:
        if not array.flags.writeable:  # of a request's own bytes; torch warns of those
            array = array.copy()
        return torch.from_numpy(array).to(self._setup.device, non_blocking=True)

    def read_levers(self) -> dict[str, Any]:
        return {name: lever.observe(self._setup) for name, lever in load_inference_catalogue().items()}

    def list_operators(self, inputs: Sample) -> tuple[str, ...]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._setup.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as seen:
            self(inputs)
        return tuple(sorted({event.key for event in seen.key_averages()}))


def encode_levers(setup: Setup) -> str:
    """Write the levers in force at the time of the build, for a package that cannot be asked later."""
    return json.dumps({name: lever.observe(setup) for name, lever in load_inference_catalogue().items()})
