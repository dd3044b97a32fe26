"""``LossMeter``: what was held is in the sums, once, however it is cut."""

from __future__ import annotations

import pytest
import torch

from fulltilt.engine.loop.progress import N_HELD, LossMeter
from fulltilt.errors import UsageError

CPU = torch.device("cpu")


def square(outputs, targets):
    return (outputs - targets).square()


def is_above(outputs, targets):
    return outputs > targets


def build_batches(n_batches, *, n_samples=3):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, n_samples, generator=generator) for _ in range(n_batches)]


def build_meter():
    return LossMeter(CPU, {"square": square, "above": is_above})


def feed(meter, batches):
    for outputs, targets in batches:
        meter.observe(outputs, targets)
        meter.add(square(outputs, targets).mean(), len(outputs))
    return meter


def expect(batches):
    outputs, targets = torch.cat(batches, dim=1).double()
    squares = square(outputs, targets).sum().item()
    return {
        "loss": pytest.approx(squares, rel=1e-6),
        "square": pytest.approx(squares, rel=1e-6),
        "above": is_above(outputs, targets).sum().item(),
    }


@pytest.mark.parametrize("n_batches", [1, N_HELD - 1, N_HELD, 2 * N_HELD + 3])
def test_sums_are_those_of_all_samples(n_batches):
    batches = [*build_batches(n_batches), *build_batches(1, n_samples=2)]
    reading = feed(build_meter(), batches).take()
    assert (reading.n_steps, reading.n_samples) == (n_batches + 1, 3 * n_batches + 2)
    assert reading.read_sums() == expect(batches)
    assert reading.losses == pytest.approx([square(*batch).mean().item() for batch in batches])


def test_a_step_that_is_dropped_is_in_no_sum_and_after_take_nothing_is_left():
    batches = build_batches(4)
    meter = feed(build_meter(), batches)
    meter.observe(*build_batches(1)[0])
    meter.bring_back()
    first = meter.take()
    second = feed(meter, batches[:1]).take()
    assert (first.read_sums(), second.read_sums()) == (expect(batches), expect(batches[:1]))


def test_a_metric_of_any_shape_and_precision_is_summed():
    meter = LossMeter(CPU, {"pixels": lambda outputs, targets: outputs})
    for values in (torch.ones(1001, dtype=torch.bfloat16), torch.ones(2, 3), torch.ones(()), torch.ones(2, 3)):
        meter.observe(values, None)
    meter.add(torch.zeros(()), 2)
    reading = meter.take()
    assert (reading.n_steps, reading.read_sums()["pixels"]) == (1, 13 + 1001)  # bfloat16 has no 1001


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (
            lambda outputs, targets: is_above(outputs, targets).float().mean(),
            "a tensor of shape (); *: leave out .mean()",
        ),
        (lambda outputs, targets: square(outputs, targets).mean().item(), "float; *: leave out .mean()"),
        (
            lambda outputs, targets: torch.ones(3, 7),
            "a tensor of shape (3, 7); *: average within each, by .flatten(1).mean(1)",
        ),
    ],
)
def test_what_is_no_value_a_sample_is_refused(metric, said):
    with pytest.raises(UsageError) as caught:
        LossMeter(CPU, {"fine": square, "acc": metric}).observe(*build_batches(1)[0])
    assert str(caught.value) == "metric acc returned " + said.replace("*", "it must return one value a sample, (B,)")


def test_a_column_is_one_value_a_sample_and_so_is_the_mean_over_one_sample():
    for metric, n_samples in ((lambda outputs, targets: square(outputs, targets)[:, None], 3), (torch.dist, 1)):
        reading = feed(LossMeter(CPU, {"square": metric}), build_batches(1, n_samples=n_samples)).take()
        assert reading.read_sums()["square"] > 0


def test_figures_in_memory_that_the_next_step_overwrites_are_kept():
    """As a captured CUDA graph returns them."""
    buffer = torch.zeros(3)
    meter = LossMeter(CPU, {"same": lambda outputs, targets: outputs})
    for step in range(1, 6):
        values = buffer.fill_(step)
        meter.observe(values, None)
        meter.add(values[0].detach(), 3)
    reading = meter.take()
    assert reading.read_sums() == {"loss": 45.0, "same": 45.0}
    assert reading.losses == [1, 2, 3, 4, 5]


def test_no_more_is_held_than_said_and_a_part_of_a_large_output_does_not_keep_the_whole():
    meter = LossMeter(CPU, {"first": lambda outputs, targets: outputs[:, 0]})
    for _ in range(5 * N_HELD):
        meter.observe(torch.ones(4, 1000), None)
        assert meter._observed[-1][0].untyped_storage().nbytes() == 16
        meter.add(torch.zeros(()), 4)
        assert len(meter._observed) < N_HELD
    assert meter.take().read_sums()["first"] == 4 * 5 * N_HELD


@pytest.mark.parametrize("n_before", [0, 5, N_HELD + 2])
def test_a_state_goes_on_where_it_was_saved(n_before):
    batches = build_batches(N_HELD + 9)
    meter, resumed = feed(build_meter(), batches[:n_before]), build_meter()
    resumed.load_state_dict(meter.state_dict())
    readings = [feed(m, batches[n_before:]).take() for m in (meter, resumed)]
    assert readings[0].read_sums() == readings[1].read_sums() == expect(batches)
    assert readings[0].losses == readings[1].losses


def test_a_state_with_other_metrics_keeps_the_loss():
    batches = build_batches(2)
    state = feed(build_meter(), batches).state_dict()
    resumed = LossMeter(CPU, {"above": is_above})
    assert not resumed.is_of(state)
    resumed.load_state_dict(state)
    assert resumed.take().read_sums() == {"loss": expect(batches)["loss"], "above": 0.0}
