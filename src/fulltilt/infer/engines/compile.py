"""compile: torch.compile at every start, for every batch and length at once. Imports torch."""

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
    freezes = setup.device.type == "cpu" and plan["quantization"] != "none"
    options = {"freezing": True} if freezes else {}  # without it torchao's products are 15 times slower than fp32
    config: Any = torch._dynamo.config
    config.recompile_limit += N_VERSIONS  # it is that of the process; past it, Dynamo goes on in eager mode
    runner = CompiledRunner(setup, CompiledGraphs(options), manifest)
    sample = read_samples(folder)[0]
    for n in range(1, N_VERSIONS + 1):
        runner(join_samples([sample] * n, manifest.inputs))
    return runner.record(folder)


class CompiledRunner(TorchRunner):
    """Calls a compiled model, and counts what its compiler built."""

    def __init__(self, setup: Setup, graphs: CompiledGraphs, manifest: Manifest):
        super().__init__(self._call, setup.device, manifest)
        self._compiled, self._graphs = torch.compile(setup.model, backend=graphs), graphs

    def _call(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for tensor, spec in zip(inputs, self._manifest.inputs, strict=True):
            dims = [dim for dim in ((0, 1) if spec.varies else (0,)) if tensor.shape[dim] > 1]
            torch._dynamo.maybe_mark_dynamic(tensor, dims)
        return self._compiled(*inputs)

    def count_graphs(self) -> tuple[int, int]:
        return self._graphs.n_graphs + super().count_graphs()[0], self._graphs.n_runs
