"""compile: torch.compile at every start, for every batch and length at once; CUDA graphs where asked. Imports torch."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulltilt.infer.engines._torch import TorchRunner, open_setup
from fulltilt.infer.joining import join_samples, read_samples
from fulltilt.infer.manifest import Manifest
from fulltilt.levers import Setup
from fulltilt.levers.compile import CompiledGraphs, keep_cache

N_VERSIONS = 2  # a batch of one, and all others


def load(folder: Path, manifest: Manifest) -> TorchRunner:
    """Compile, and answer a batch of one and one of two. All other sizes share the code of two."""
    keep_cache()
    plan, setup = manifest.plan, open_setup(folder, manifest)
    options = torch._inductor.list_mode_options("reduce-overhead" if plan["cuda_graphs"] else "default")
    if setup.device.type == "cpu" and plan["quantization"] != "none":
        options["freezing"] = True  # without it torchao's products on a CPU are 15 times slower than fp32
    config: Any = torch._dynamo.config
    config.recompile_limit += N_VERSIONS  # it is that of the process; past it, Dynamo goes on in eager mode
    runner = CompiledRunner(setup, CompiledGraphs(options), [spec.varies for spec in manifest.inputs])
    sample = read_samples(folder)[0]
    for n in range(1, N_VERSIONS + 1):
        runner(join_samples([sample] * n, manifest.inputs))
    return runner


class CompiledRunner(TorchRunner):
    """Calls a compiled model, and counts what its compiler built."""

    def __init__(self, setup: Setup, graphs: CompiledGraphs, varying: list[bool]):
        super().__init__(self._call, setup.device)
        self._compiled, self._graphs, self._varying = torch.compile(setup.model, backend=graphs), graphs, varying

    def _call(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for tensor, varies in zip(inputs, self._varying, strict=True):
            dims = [dim for dim in ((0, 1) if varies else (0,)) if tensor.shape[dim] > 1]
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
        return self._compiled(*inputs)

    def count_graphs(self) -> tuple[int, int]:
        return self._graphs.n_graphs + _count_recordings(self._device), self._graphs.n_runs


def _count_recordings(device: torch.device) -> int:
    """Count the CUDA graphs that were recorded on a device."""
    if device.type != "cuda":
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(device.index or 0, create_if_none_exists=False)
    found = re.search(r"\d+", repr(manager.graph_counter)) if manager else None  # reading it must not count
    return int(found[0]) if found else 0
