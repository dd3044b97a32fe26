"""One arm of ``lever_memory`` in a process of its own: builds, trains two steps, evaluates one; JSON on stdout.

``python -m benchmarks._lever_memory_probe '{"speed": {"precision": "bf16"}}' --batch-size 32 --device cpu``
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import TensorDataset

from benchmarks._memory_probe import measure_allocated_peak_bytes
from fulltilt import Workload
from fulltilt.config import config_from_values, plan_of
from fulltilt.engine import build_run
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.measure import NullTimer
from fulltilt.tasks import build_model

N_CLASSES = 10
MODEL = "resnet18(small_images=true)"  # with AdamW: 0.17 GiB of weights, gradients and optimizer state
_GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("values", type=json.loads, help="sections of a configuration")
    parser.add_argument("--batch-size", type=int, required=True, help="effective batch")
    parser.add_argument("--side-px", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)  # peaks do not depend on it, and a busy machine is finished sooner
    print(json.dumps(probe(args.values, args.batch_size, args.side_px, args.device)))


def probe(
    values: dict[str, Any], effective_batch_size: int, side_px: int, device: str, model: str = MODEL
) -> dict[str, float | None]:
    """Peaks in GiB: allocated, and on a GPU reserved by the allocator too."""
    allocated_bytes = measure_allocated_peak_bytes(
        lambda: _run(values, effective_batch_size, side_px, device, model), device
    )
    reserved_bytes = torch.cuda.max_memory_reserved() if device == "cuda" else None
    return {
        "allocated_peak_gib": allocated_bytes / _GIB,
        "reserved_peak_gib": None if reserved_bytes is None else reserved_bytes / _GIB,
    }


def _run(values: dict[str, Any], effective_batch_size: int, side_px: int, device: str, model: str) -> None:
    accumulate = values.get("speed", {}).get("accumulate", 1)
    data = {**values.get("data", {}), "batch_size": effective_batch_size // accumulate}
    values = {**values, "data": data}
    config = config_from_values(values, base_dir=".")
    workload = _build_workload(2 * effective_batch_size, side_px, model)  # a batch more, for what is copied ahead
    with build_run(config, plan_of(config), device=device, workload=workload) as run:
        step = TrainStep(run)
        for epoch in range(2):
            step(run.start_epoch(epoch), NullTimer())
        run.setup.model.eval()
        with torch.no_grad():
            step.compute_loss(next(run.start_epoch(2)))


def _build_workload(n_samples: int, side_px: int, model: str) -> Workload:
    return Workload(
        model=lambda: build_model(model, n_classes=N_CLASSES),
        dataset=lambda: TensorDataset(torch.zeros(n_samples, 3, side_px, side_px), torch.zeros(n_samples).long()),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: optim.AdamW(parameters, lr=1e-4),
    )


if __name__ == "__main__":
    main()
