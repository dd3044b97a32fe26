"""optim.ema: the average by hand, what is evaluated, what a checkpoint keeps, and that no step waits for it."""

import pytest
import torch
from torch import nn
from training_cases import build_config, build_cpu_run

from fulltilt.engine.loop.evaluate import build_validation_loader, evaluate
from fulltilt.engine.step.average import WeightAverage
from fulltilt.engine.step.train_step import TrainStep
from fulltilt.errors import ConfigError
from fulltilt.measure import NullTimer
from fulltilt.measure.fake_memory import ALLOCATION_BYTES, estimate_memory


def build(ema):
    return build_cpu_run(build_config(optim__ema=ema, speed__threads=1))


def take_steps(run, n_steps):
    """Weights and running statistics after each step."""
    step, batches, seen = TrainStep(run), run.start_epoch(0), []
    for _ in range(n_steps):
        step(batches, NullTimer())
        seen.append({name: tensor.clone() for name, tensor in run.setup.model.state_dict().items()})
    return seen


@pytest.mark.parametrize("ema", [0.3, 0.999])
def test_the_average_is_the_recursion_by_hand(ema):
    run = build(ema)
    expected = {name: t.clone().double() for name, t in run.setup.model.state_dict().items() if t.is_floating_point()}
    for n, weights in enumerate(take_steps(run, 5)):
        d = min(ema, (1 + n) / (10 + n))
        expected = {name: d * old + (1 - d) * weights[name].double() for name, old in expected.items()}
    kept = run.average.state_dict()["weights"]
    assert kept.keys() >= {"1.running_mean", "1.running_var"}
    torch.testing.assert_close({name: t.double() for name, t in kept.items()}, expected, rtol=1e-5, atol=1e-7)


def test_training_itself_is_bit_equal_with_and_without_an_average():
    torch.testing.assert_close(take_steps(build(None), 4), take_steps(build(0.9), 4), rtol=0, atol=0)


def test_evaluation_takes_the_average_and_gives_the_weights_back_though_it_was_stopped():
    run, plain = build(0.99), build(None)
    weights = take_steps(run, 4)[-1]
    assert any("running average" in note for note in run.notes)
    loader = build_validation_loader(run)
    figures = evaluate(run, loader)
    plain.setup.model.load_state_dict(weights | run.average.state_dict()["weights"])
    assert figures == evaluate(plain, loader)
    plain.setup.model.load_state_dict(weights)
    assert figures != evaluate(plain, loader)
    assert evaluate(run, loader, should_stop=lambda: True) is None
    assert all(torch.equal(run.setup.model.state_dict()[name], value) for name, value in weights.items())


def test_masks_and_frozen_weights_are_left_alone():
    """Averaging a mask of minus infinity would make it NaN."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.register_buffer("mask", torch.full((2, 2), float("-inf")))
    model[1].requires_grad_(False)
    average = WeightAverage(model, 0.9)
    average.update()
    assert average.state_dict()["weights"].keys() == {"0.weight", "0.bias"}


def test_a_shared_weight_is_averaged_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    average = WeightAverage(model, 0.9)
    with torch.no_grad():
        model[0].weight.add_(1.0)
    before = average.state_dict()["weights"]["0.weight"].clone()
    average.update()
    torch.testing.assert_close(average.state_dict()["weights"]["0.weight"], before + 0.9)
    with average.in_force():
        assert model[0].weight is model[1].weight


def test_its_memory_is_in_the_estimate():
    runs = plain, averaged = build(None), build(0.9)
    options = {"batch": next(plain.start_epoch(0)), "build_step": TrainStep}
    before, after = (estimate_memory(run, 16, **options).parameters_bytes for run in runs)
    average, unit = averaged.average.state_dict()["weights"].values(), ALLOCATION_BYTES["cpu"]
    assert after - before == sum(-(-t.untyped_storage().nbytes() // unit) * unit for t in average)


@pytest.mark.parametrize("ema", [0, 1, 1.5, True])
def test_a_decay_outside_of_its_range_is_refused(ema):
    with pytest.raises(ConfigError, match="ema"):
        build_config(optim__ema=ema)
