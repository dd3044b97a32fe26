"""compile: torch.compile at every start, for every batch and length at once; CUDA graphs where asked. Imports torch."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulltilt.infer.engines._torch import TorchRunner, apply_levers, rebuild_module
from fulltilt.infer.joining import join_samples
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.model import InferenceModel
from fulltilt.infer.packing import read_samples
from fulltilt.levers.compile import CompiledGraphs, keep_cache

PACKAGES = ("torch",)
N_VERSIONS = 2  # a batch of one, and all others


def build(model: InferenceModel, plan: Mapping[str, Any], folder: Path) -> None:
    """Write nothing: code is compiled when the artefact is opened, and kept in the cache of the compiler."""


def load(folder: Path, manifest: Manifest, plan: Mapping[str, Any]) -> TorchRunner:
    """Compile, and answer a batch of one and one of two. All other sizes share the code of two."""
    keep_cache()
    setup = apply_levers(rebuild_module(folder, manifest), plan, torch.device(manifest.device))
    mode = "reduce-overhead" if plan["cuda_graphs"] else "default"
    options = torch._inductor.list_mode_options(mode)
    if setup.device.type == "cpu" and plan["quantization"] != "none":
        options["freezing"] = True  # without it torchao's products on a CPU are 15 times slower than fp32
    graphs = CompiledGraphs(options)
    config: Any = torch._dynamo.config
    config.recompile_limit += N_VERSIONS  # it is that of the process; past it, Dynamo goes on in eager mode
    compiled = torch.compile(setup.model, backend=graphs)
    varying = [spec.varies for spec in manifest.inputs]

    def forward(*inputs: Tensor) -> tuple[Tensor, ...]:
        for tensor, varies in zip(inputs, varying, strict=True):
            dims = [dim for dim in ((0, 1) if varies else (0,)) if tensor.shape[dim] > 1]
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
        return compiled(*inputs)

    runner = TorchRunner(
        forward, setup, graphs=graphs, builds=lambda: graphs.n_graphs + _count_recordings(setup.device)
    )
    sample = next(iter(read_samples(folder)))
    for n in range(1, N_VERSIONS + 1):
        runner(join_samples([sample] * n, manifest.inputs))
    return runner


def _count_recordings(device: torch.device) -> int:
    """Count the CUDA graphs that were recorded on a device."""
    if device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    found = re.search(r"\d+", repr(manager.graph_counter)) if manager else None  # reading it must not count
    return int(found[0]) if found else 0
