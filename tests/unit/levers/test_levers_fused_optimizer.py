"""The fused switch on optimizers that were built without it."""

import pytest
import torch
from torch import nn, optim

from fulltilt.engine.build.facts import name_optimizer
from fulltilt.errors import PlanObstacleError
from fulltilt.levers import Setup, load_catalogue

LEVER = load_catalogue()["fused_optimizer"]


class OwnAdamW(optim.AdamW):
    """Takes arguments of its own, so it could not be built again by anybody else."""

    def __init__(self, parameters, strength):
        super().__init__(parameters, lr=strength)


class OwnStep(optim.SGD):
    def step(self, closure=None):
        return None


BUILDERS = {
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "adamw": lambda p: optim.AdamW([{"params": [q], "weight_decay": 0.1 * i} for i, q in enumerate(p)]),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "own": lambda p: OwnAdamW(p, 0.05),
}


def run_steps(build, *, fused: bool) -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    setup = Setup(device=torch.device("cpu"), model=model, optimizer=build(list(model.parameters())))
    LEVER.apply(setup, fused)
    assert LEVER.observe(setup) is fused
    for _ in range(4):
        model(torch.randn(7, 5)).square().mean().backward()
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return model, setup.optimizer


@pytest.mark.parametrize("name", BUILDERS)
def test_fused_steps_equal_plain_ones_within_rounding(name):
    plain, _ = run_steps(BUILDERS[name], fused=False)
    fused, optimizer = run_steps(BUILDERS[name], fused=True)
    for mine, theirs in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert optimizer.state_dict()["param_groups"][0]["fused"] is True
    assert optimizer._step_supports_amp_scaling is True


def build_stepped(parameters):
    _, optimizer = run_steps(BUILDERS["adamw"], fused=False)
    return optimizer


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (optim.RMSprop, "RMSprop has no fused step"),
        (lambda p: optim.Adam(p, foreach=True), "foreach=True"),
        (build_stepped, "already stepped"),
    ],
)
def test_optimizers_it_does_not_fit_are_refused(build, said):
    with pytest.raises(PlanObstacleError, match=said):
        LEVER.apply(Setup(device=torch.device("cpu"), optimizer=build(nn.Linear(2, 2).parameters())), True)


def test_false_switches_a_fused_optimizer_off_and_says_so():
    def build_fused(parameters):
        return optim.Adam(parameters, lr=0.1, fused=True)

    setup = Setup(device=torch.device("cpu"), optimizer=build_fused(nn.Linear(2, 2).parameters()))
    LEVER.apply(setup, False)
    assert LEVER.observe(setup) is False
    assert "built with fused=True" in setup.notes[0]
    mine, _ = run_steps(BUILDERS["adam"], fused=False)
    theirs, _ = run_steps(build_fused, fused=False)
    assert torch.equal(mine.weight, theirs.weight)


def test_guards_see_the_class_whose_step_runs():
    parameters = list(nn.Linear(2, 2).parameters())
    assert name_optimizer(OwnAdamW(parameters, 0.1)) == "AdamW"
    assert name_optimizer(OwnStep(parameters, lr=0.1)) == "OwnStep"
    assert name_optimizer(optim.SGD(parameters, lr=0.1)) == "SGD"
