"""The benchmarks of memory: what is measured before a prediction, whose errors belong together, what a probe sees."""

from __future__ import annotations

import pytest
from benchmarks import lever_memory
from benchmarks._memory_cases import MODELS, build_cases
from benchmarks._memory_probe import choose_next, is_settled, measure_until_settled
from benchmarks.memory_prediction import find_model

from fulltilt.config import config_from_values
from fulltilt.levers import load_catalogue
from fulltilt.tasks import build_model
from fulltilt.tuner.search.model.memory import MemoryCurve

POWERS = tuple(2**k for k in range(11))


def bent(batch):
    """GiB: the optimizer's step below batch 10, from there on the backward pass, which grows."""
    return max(4.0 + 0.001 * batch, 2.0 + 0.2 * batch)


FAKE = {batch: bent(batch) for batch in POWERS}


def test_with_fake_points_two_or_three_real_ones_are_enough():
    curve = measure_until_settled(MemoryCurve(fake=FAKE), POWERS, lambda batch: 0.4 + 1.02 * bent(batch))
    assert len(curve.real) <= 3
    assert min(curve.real) > 10, "a first point before the bend would show no growth"
    assert is_settled(curve)
    assert curve.predict_gib(512).gib == pytest.approx(0.4 + 1.02 * bent(512), rel=0.01)


def test_a_peak_that_came_otherwise_than_predicted_asks_for_another():
    """Real peaks grow faster from 16 on, which no fake point says."""
    curve = measure_until_settled(MemoryCurve(fake=FAKE), POWERS, lambda batch: bent(batch) + 0.3 * max(0, batch - 16))
    assert max(curve.real) > 32


def test_growth_that_hardly_shows_is_not_believed():
    flat = {batch: 4.0 + 1e-4 * batch for batch in POWERS}
    curve = MemoryCurve(real={1: flat[1], 2: flat[2]}, fake=flat)
    assert not is_settled(curve)
    assert choose_next(curve, POWERS) == 4
    assert choose_next(MemoryCurve(fake=dict.fromkeys(POWERS, 4.0)), POWERS) == 1024, "where none grows, the largest"


def test_batches_double_even_where_candidates_lie_closer():
    curve = MemoryCurve(real={16: bent(16)}, fake=FAKE)
    candidates = (range(8, 129, 8), [16, 24], [8, 16])
    assert [choose_next(curve, these) for these in candidates] == [32, 24, None]


def test_every_case_belongs_to_its_model():
    found = [find_model(case.name) for case in build_cases()]
    assert set(found) == {model.name for model in MODELS}
    assert find_model("own sensor_transformer, diffusion, adam, fused") == "own sensor_transformer, diffusion"
    with pytest.raises(LookupError, match="begins with no model's name; did you mean own small_cnn"):
        find_model("own small_cnm, adamw")


def test_every_arm_is_a_configuration_and_every_lever_that_trades_device_memory_has_one():
    keys = set()
    for setting in lever_memory.SETTINGS:
        config_from_values(setting.values, base_dir=".")
        keys |= {f"{section}.{name}" for section, values in setting.values.items() for name in values}
    assert lever_memory.SETTINGS[0].name == lever_memory.PLAIN
    levers = load_catalogue().values()
    wanted = {lever.key for lever in levers if "memory" in lever.trades and lever.stage != "loader"}
    wanted -= {"speed.retain_freed_memory"}  # what the C library keeps, no allocator of torch shows: retain_memory does
    assert wanted <= keys


def test_changes_are_against_the_plain_run():
    peaks = {
        name: [{"allocated_peak_gib": gib} for gib in values]
        for name, values in {"plain": (1.9, 2.0, 2.1), "half": (1.0, 1.0, 1.0)}.items()
    }
    arms = lever_memory.build_arms(peaks, "allocated_peak_gib", "x")
    assert {(arm.arm, arm.metric): arm.median for arm in arms} == {
        ("plain", "allocated_peak_gib"): 2.0,
        ("half", "allocated_peak_gib"): 1.0,
        ("half", "allocated_peak_change_pct"): pytest.approx(-50.0),
    }


def test_the_probe_sees_what_checkpointing_and_an_average_do():
    model = "wideresnet(depth=10, width=2)"
    plain, checkpointed, averaged = (
        lever_memory.probe(values, 8, "cpu", side_px=16, model=model)["allocated_peak_gib"]
        for values in ({}, {"speed": {"activation_checkpointing": True}}, {"optim": {"ema": 0.9}})
    )
    weights_gib = sum(p.numel() for p in build_model(model).parameters()) * 4 / 2**30
    assert averaged - plain == pytest.approx(weights_gib, rel=0.05)
    assert checkpointed < plain
