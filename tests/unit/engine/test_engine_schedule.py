"""Schedules against their definitions and against PyTorch's own schedulers."""

import math

import pytest
import torch

from fulltilt.engine.step.schedule import SCHEDULES, LearningRate, build_schedule, count_warmup_steps
from fulltilt.errors import ConfigError


def list_factors(spec, *, total_steps=20, steps_per_epoch=5, warmup=0):
    schedule = build_schedule(spec, total_steps=total_steps, steps_per_epoch=steps_per_epoch, warmup=warmup)
    return [schedule(step) for step in range(total_steps)]


def list_torch_rates(name, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, rates = getattr(torch.optim.lr_scheduler, name)(optimizer, **options), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("cosine(final=0.1)", "CosineAnnealingLR", {"T_max": 20, "eta_min": 0.1}),
        ("linear(final=0.2)", "LinearLR", {"start_factor": 1.0, "end_factor": 0.2, "total_iters": 20}),
        ("step(size=2)", "StepLR", {"step_size": 10, "gamma": 0.1}),
    ],
)
def test_schedules_are_those_of_torch(spec, name, options):
    assert list_factors(spec) == pytest.approx(list_torch_rates(name, **options))


def test_onecycle_is_that_of_torch():
    options = {"max_lr": 1.0, "total_steps": 21, "pct_start": 0.3, "div_factor": 25, "final_div_factor": 1e4}
    found = list_factors("onecycle(warmup=6)")
    assert found[0] == pytest.approx(list_torch_rates("OneCycleLR", cycle_momentum=False, **options)[0])
    assert max(found) == 1.0 == found[6]
    assert found[6:] == sorted(found[6:], reverse=True)
    assert found[:7] == sorted(found[:7])
    assert found[-1] < 0.02


@pytest.mark.parametrize(
    ("spec", "warmup", "expected"),
    [
        ("constant", 0, [1.0] * 20),
        ("step(milestones=[1, 3], gamma=0.5)", 0, [1.0] * 5 + [0.5] * 10 + [0.25] * 5),
        ("step(milestones=[2], gamma=0.5)", 3, [0.25, 0.5, 0.75] + [1.0] * 7 + [0.5] * 10),
    ],
)
def test_milestones_count_epochs_from_the_start_though_there_is_a_warm_up(spec, warmup, expected):
    assert list_factors(spec, warmup=warmup) == expected


def test_warm_up_rises_in_a_line_to_where_the_schedule_begins():
    factors = list_factors("cosine", warmup=4)
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[4:] == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 16)) for i in range(16)])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("warmup", [0, 0.1, 5, "1 epoch"])
@pytest.mark.parametrize("total_steps", [6, 7, 100])
def test_every_schedule_stays_between_zero_and_one(name, warmup, total_steps):
    spec = "step(size=1)" if name == "step" else name
    factors = list_factors(spec, total_steps=total_steps, steps_per_epoch=5, warmup=warmup)
    assert all(0.0 < f <= 1.0 for f in factors)


@pytest.mark.parametrize("spec", ["cosine", "linear", "onecycle", "step(size=1)"])
def test_a_run_of_one_step_has_a_rate(spec):
    assert list_factors(spec, total_steps=1, steps_per_epoch=1) == [1.0]


@pytest.mark.parametrize(("warmup", "expected"), [(0, 0), (0.25, 25), (7, 7), ("7 steps", 7), ("2 epochs", 20)])
def test_warm_up_has_three_units(warmup, expected):
    assert count_warmup_steps(warmup, total_steps=100, steps_per_epoch=10) == expected


@pytest.mark.parametrize(("spec", "warmup"), [("cosine", "4 epochs"), ("cosine", 30), ("onecycle(warmup=20)", 0)])
def test_a_warm_up_as_long_as_the_run_is_shortened_to_half_of_it_and_that_is_said(spec, warmup):
    notes = []
    schedule = build_schedule(spec, total_steps=20, steps_per_epoch=5, warmup=warmup, notes=notes)
    factors = [schedule(step) for step in range(20)]
    assert max(factors) == 1.0 == factors[10]
    assert factors == [*sorted(factors[:10]), *sorted(factors[10:], reverse=True)]
    (note,) = notes
    assert "leaves nothing of a run of 20: it is shortened to 10, half of the run" in note


@pytest.mark.parametrize(
    ("spec", "warmup", "says"),
    [
        ("cosin", 0, "cosine"),
        ("cosine(fianl=0.1)", 0, "final"),
        ("cosine(final=-1)", 0, "at least 0"),
        ("step", 0, "milestones or size"),
        ("step(size=1, milestones=[1])", 0, "milestones or size"),
        ("step(size=0)", 0, "above 0"),
        ("step(milestones=[-1])", 0, "above 0"),
        ("constant", -1, "warmup -1"),
        ("onecycle(start_div=0)", 0, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(spec, warmup, says):
    with pytest.raises(ConfigError, match=says):
        list_factors(spec, warmup=warmup)


def test_every_group_keeps_its_share():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.4}])
    rate = LearningRate(optimizer, build_schedule("linear", total_steps=10, steps_per_epoch=10))
    rate.set_step(5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.05, 0.2])
    assert rate.compute_lr(5) == pytest.approx(0.05)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.001
    optimizer.load_state_dict(state)
    rate.set_step(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4], "also of groups that a state replaced"
