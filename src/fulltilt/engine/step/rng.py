"""Seeds, captures and restores the random generators that a run draws from."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_rng(generators: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Return the state of every random generator a run draws from, as tensors and plain values."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else [],
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(internal), next_gauss],
        "generators": {name: generator.get_state() for name, generator in generators.items()},
    }


def restore_rng(state: Mapping[str, Any], generators: Mapping[str, torch.Generator]) -> None:
    """Put back what ``capture_rng`` took; GPUs that were not there then keep their own state."""
    torch.set_rng_state(state["torch"])
    for index, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, index)
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, next_gauss = state["python"]
    random.setstate((version, tuple(internal), next_gauss))
    for name, generator in generators.items():
        if name in state["generators"]:
            generator.set_state(state["generators"][name])
