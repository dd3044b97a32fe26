"""Runs built from a few values, and the steps that they take, for the tests of a step."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fulltilt.config import config_from_values
from fulltilt.engine.build.builder import build_run
from fulltilt.engine.step.cached_step import build_step
from fulltilt.levers import default_plan
from fulltilt.measure import NullTimer
from fulltilt.tasks import Workload

N_SAMPLES = 100  # windows of 64: one full, one of 36; micro-batches of 16: four, then 16, 16 and 4


def build_dataset():
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(N_SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (N_SAMPLES,), generator=generator))


def build_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def build_small_run(batch_size, accumulate=1, *, plan=None, clip_norm=None, device="cpu", seed=7, **workload):
    """``plan`` and ``workload`` change what is a linear model of ``build_dataset``, trained by SGD in one thread."""
    given = {"model": lambda: nn.Linear(6, 3), "dataset": build_dataset, "loss": nn.CrossEntropyLoss()}
    full = default_plan({"batch_size": batch_size, "accumulate": accumulate, "threads": 1} | (plan or {}))
    config = config_from_values({"optim": {"clip_norm": clip_norm}, "run": {"seed": seed}}, base_dir=".")
    return build_run(config, full, device=device, workload=Workload(**given | {"optimizer": build_sgd} | workload))


def take_epochs(run, n_epochs=1, *, observe=None):
    """The outcomes of all steps."""
    step, outcomes = build_step(run, observe=observe), []
    for epoch in range(n_epochs):
        batches = run.start_epoch(epoch)
        while (outcome := step(batches, NullTimer())) is not None:
            outcomes.append(outcome)
    return outcomes


def take_step(run, timer=None, *, observe=None):
    """The outcome of the first step."""
    return build_step(run, observe=observe)(run.start_epoch(0), timer or NullTimer())


def train(run, n_epochs=2, *, observe=None):
    """Outcomes, and the gradients that each optimizer step saw."""
    gradients = []

    def keep(optimizer, args, kwargs):
        gradients.append([p.grad.clone() for p in run.setup.model.parameters()])

    run.setup.optimizer.register_step_pre_hook(keep)
    return take_epochs(run, n_epochs, observe=observe), gradients


def assert_same(whole, parts, *, rtol=1e-9, atol=1e-12):
    """Outcomes and gradients of two trainings."""
    assert [o.n_samples for o in whole[0]] == [o.n_samples for o in parts[0]] == [64, 36] * (len(whole[0]) // 2)
    for mine, theirs in zip([o.loss for o in whole[0]], [o.loss for o in parts[0]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    for mine, theirs in zip(whole[1], parts[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


def compute_norms(gradients):
    return [torch.cat([gradient.flatten() for gradient in of_step]).norm().item() for of_step in gradients]
