"""muon: each weight is moved as by the optimizer it belongs to alone; state, rates and copies are one."""

import copy

import pytest
import torch
from torch import nn, optim

from fulltilt.engine.build.optimizers import OPTIMIZERS, JointOptimizer
from fulltilt.engine.step.schedule import LearningRate
from fulltilt.errors import UsageError


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))


def take_steps(model, optimizers, n_steps, first=0):
    for i in range(first, first + n_steps):
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(i))
        model(inputs).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def equal(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters(), strict=True))


def test_every_weight_moves_as_with_its_own_optimizer_alone():
    joint, apart = build_model(), build_model()
    take_steps(joint, [OPTIMIZERS["muon"](joint.parameters(), lr=0.02, other_lr=0.003, weight_decay=0.1)], 4)
    matrices, others = ([p for p in apart.parameters() if (p.dim() == 2) is value] for value in (True, False))
    parts = [optim.Muon(matrices, lr=0.02, weight_decay=0.1), optim.AdamW(others, lr=0.003, weight_decay=0.1)]
    take_steps(apart, parts, 4)
    assert equal(joint, apart)
    assert not equal(joint, build_model())


def test_state_goes_on_where_it_was_and_into_the_parts():
    whole, first, second = build_model(), build_model(), build_model()
    take_steps(whole, [OPTIMIZERS["muon"](whole.parameters())], 5)
    before = OPTIMIZERS["muon"](first.parameters())
    take_steps(first, [before], 3)
    second.load_state_dict(first.state_dict())
    after = OPTIMIZERS["muon"](second.parameters())
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    take_steps(second, [after], 2, first=3)
    assert equal(second, whole)


def test_a_schedule_scales_all_parts_and_a_deep_copy_steps_by_itself():
    model = build_model()
    optimizer = OPTIMIZERS["muon"](model.parameters(), lr=0.02, other_lr=0.004)
    LearningRate(optimizer, lambda taken: 0.5).set_step(0)
    assert [group["lr"] for part in optimizer._parts for group in part.param_groups] == [0.01, 0.002]
    before = copy.deepcopy(model)
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert isinstance(twin, JointOptimizer)
    take_steps(twin_model, [twin], 1)
    assert equal(model, before)
    take_steps(model, [optimizer], 1)
    assert equal(model, twin_model)


def test_a_model_without_matrices_is_refused():
    with pytest.raises(UsageError, match="2-d weights"):
        OPTIMIZERS["muon"](nn.Conv2d(3, 3, 3).parameters())
