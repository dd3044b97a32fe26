"""What every lever says of exactness (``Lever.exactness``) holds in training runs; a lever without a case here fails.

Losses and weights of a small network (convolutions, BatchNorm, dropout) after two epochs, with the lever and without:
"equal" is to the last bit, "within tolerance" is that of the case, "another recipe" must come to another result.
"""

import dataclasses
import functools
import gc
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.levers.lever_cases import (
    CATALOGUE,
    N_CLASSES,
    NEEDS_GPU,
    Network,
    build,
    is_defined,
    observe,
    take_steps,
    write_rows,
)
from torch import nn

from fulltilt.data import build_pipeline
from fulltilt.data.batched import BatchedDataset
from fulltilt.data.images.image_sets import MemoryImages
from fulltilt.levers import Facts, find_obstacles

N_SAMPLES = 28  # batches of 8 with a tail of 4
COMPILED_AS_EAGER = "test_compiled_losses_are_those_of_eager_mode_and_the_second_run_finds_its_code"


class Images(BatchedDataset):
    """Small images with noise from the generator that the loader hands out, as the own datasets augment."""

    noise = 0.1

    def __len__(self) -> int:
        return N_SAMPLES

    def get_batch(self, indices: Any, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        images = [torch.rand(2, 6, 6, generator=torch.Generator().manual_seed(int(i))) for i in indices]
        noise_BCHW = self.noise * torch.randn(len(images), 2, 6, 6, generator=generator)
        return torch.stack(images) + noise_BCHW, torch.as_tensor(indices) % N_CLASSES


class Quiet(Images):
    noise = 0.0


def build_plain() -> nn.Module:
    """Without BatchNorm, whose statistics are of the micro-batch, and without dropout, whose draws follow it."""
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.Tanh(), nn.Linear(8, N_CLASSES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Values to hold against the default, in a plan with ``given``; ``device`` is where they exist."""

    values: tuple[Any, ...]
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    rtol: float = 1e-4
    device: str = "cpu"
    model: Any = Network
    dataset: Any = Images
    held_by: str = ""  # a test elsewhere in this folder, "file::function"


def build_pixels() -> MemoryImages:
    """Images with a pipeline in which nothing is random: what is, is drawn elsewhere and not the same."""
    pixels = torch.randint(0, 256, (N_SAMPLES, 2, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pipeline = build_pipeline("normalize(mean=[0.4, 0.5], std=[0.2, 0.3])")
    return MemoryImages("own", pixels, torch.arange(N_SAMPLES) % N_CLASSES, classes="abc", transform=pipeline)


CASES = {
    "accumulate": Case(values=(2,), model=build_plain),
    "activation_checkpointing": Case(values=(True, "blocks.1")),
    "batch_size": Case(values=(4,), model=build_plain),
    "channels_last": Case(values=(True,), model=functools.partial(Network, dropout=0.0)),
    "compile": Case(values=(), held_by=f"test_levers_compile.py::{COMPILED_AS_EAGER}"),
    "cudnn_benchmark": Case(values=(True,), device="cuda"),
    "deterministic": Case(values=(True,)),
    "device_prefetch": Case(values=(True,), given={"pin_memory": True}, device="cuda"),
    "empty_cache_every": Case(values=("1 step", "1 epoch"), device="cuda"),
    # Emptied at every step: segments that earlier tests left would serve this one.
    "expandable_segments": Case(values=(True,), given={"empty_cache_every": "1 step"}, device="cuda"),
    "fused_optimizer": Case(values=(True,)),
    "num_workers": Case(values=(1, 2)),
    "persistent_workers": Case(values=(True,), given={"num_workers": 1}),
    "pin_memory": Case(values=(True,), device="cuda"),
    "placement": Case(values=("memory_map", "ram")),
    "precision": Case(values=("bf16", "fp16"), rtol=5e-2),
    "prefetch_factor": Case(values=(1, 4), given={"num_workers": 1}),
    "retain_freed_memory": Case(values=(), held_by="test_levers_retain_freed_memory.py::test_the_same_is_learned"),
    "thread_affinity": Case(values=(True,), given={"threads": 2}),
    "threads": Case(values=(2,)),
    "transforms": Case(values=("device",), dataset=build_pixels),
    "wait_policy": Case(values=(), held_by="test_levers_wait_policy.py::test_the_same_is_learned"),
    "worker_threads": Case(values=(2,), given={"num_workers": 1}),
}


def train(case: Case, dataset: Any = Images, **plan: Any) -> tuple[list[float], torch.Tensor]:
    """Losses of two epochs, and everything in the state dict at their end, in one row."""
    losses = []
    if case.device == "cuda":  # what an earlier run left would serve this one
        gc.collect()
        torch.cuda.empty_cache()
    with build(
        case.model,
        dataset,
        device=case.device,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        **case.given | plan,
    ) as run:
        for epoch in range(2):
            losses += take_steps(run, epoch=epoch)
        for name, value in run.plan.items():
            assert value is None or observe(run, name) == value, name
        weights = [value.detach().double().cpu().flatten() for value in run.setup.model.state_dict().values()]
    return losses, torch.cat(weights)


def hold(name: str, case: Case, dataset: Any) -> None:
    """Train with the default and with each value, and hold the results against the lever's own statement."""
    lever = CATALOGUE[name]
    losses, weights = train(case, dataset)
    for value in case.values:
        assert not lever.changes_recipe(value) or lever.exactness == "another recipe"
        mine, my_weights = train(case, dataset, **{name: value})
        if lever.exactness == "equal":
            assert losses == mine, value
            assert torch.equal(weights, my_weights), value
        elif lever.exactness == "within tolerance":
            torch.testing.assert_close(mine, losses, rtol=case.rtol, atol=case.rtol)
        else:
            assert my_weights.shape == weights.shape
            assert not torch.allclose(weights, my_weights, rtol=1e-3), value


def test_every_lever_has_a_case():
    assert CASES.keys() == CATALOGUE.keys()
    for case in CASES.values():
        assert case.values if not case.held_by else is_defined(case.held_by)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=NEEDS_GPU if case.device == "cuda" else [])
        for name, case in CASES.items()
        if not case.held_by
    ],
)
def test_a_lever_is_as_exact_as_it_says(name, tmp_path):
    _, rows = write_rows(tmp_path / "rows.h5", np.arange(N_SAMPLES) % N_CLASSES)
    hold(name, CASES[name], rows if name == "placement" else CASES[name].dataset)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.device == "cuda"])
def test_what_is_not_held_here_cannot_apply_here(name):
    for value in CASES[name].values:
        assert find_obstacles({name: value}, Facts(device_type="cpu"))


@pytest.mark.parametrize(("batch_size", "accumulate"), [(4, 2), (2, 4)])
def test_accumulation_keeps_the_recipe_where_the_effective_batch_stays(batch_size, accumulate):
    """The statement behind "another recipe": the effective batch is what it changes, and nothing else."""
    case = Case(values=(), model=build_plain)
    whole, weights = train(case, Quiet)
    parts, my_weights = train(case, Quiet, batch_size=batch_size, accumulate=accumulate)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(my_weights, weights, rtol=1e-3, atol=1e-5)


def test_dropout_draws_in_the_order_of_memory():
    """Why the case of channels_last has no dropout: its masks are as good, and not the same."""
    case = dataclasses.replace(CASES["channels_last"], model=Network)
    (losses, _), (mine, _) = train(case), train(case, channels_last=True)
    assert losses != pytest.approx(mine, rel=case.rtol)
    assert "Dropout" in CATALOGUE["channels_last"].doc


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_deterministic_reruns_are_bit_equal(device):
    case = dataclasses.replace(CASES["deterministic"], device=device)
    plan = {"deterministic": True, "num_workers": 1}
    (losses, weights), (again, same_weights) = train(case, **plan), train(case, **plan)
    assert torch.are_deterministic_algorithms_enabled()
    assert losses == again
    assert torch.equal(weights, same_weights)
    other, _ = train(case, **plan, batch_size=7)
    assert losses[0] != other[0], "losses do depend on what the run does"
