from __future__ import annotations

import pytest
from benchmarks import _lever_memory_probe, lever_memory

from fulltilt.config import config_from_values
from fulltilt.levers import load_catalogue
from fulltilt.tasks import build_model

KEYS = {
    f"{section}.{name}"
    for setting in lever_memory.SETTINGS
    for section, values in setting.values.items()
    for name in values
}


def test_every_lever_that_trades_device_memory_has_an_arm():
    levers = load_catalogue().values()
    wanted = {lever.key for lever in levers if "memory" in lever.trades and lever.stage != "loader"}
    wanted -= {"speed.retain_freed_memory"}  # what the C library keeps, no allocator of torch shows: retain_memory does
    assert wanted <= KEYS


def test_every_arm_is_a_configuration():
    for setting in lever_memory.SETTINGS:
        config_from_values(setting.values, base_dir=".")
    assert lever_memory.SETTINGS[0].name == lever_memory.PLAIN


def test_changes_are_against_the_plain_run():
    def rows(*values: float) -> list[dict[str, float]]:
        return [{"allocated_peak_gib": value} for value in values]

    arms = lever_memory._build_arms(
        {"plain": rows(1.9, 2.0, 2.1), "half": rows(1.0, 1.0, 1.0)}, "allocated_peak_gib", "x"
    )
    found = {(arm.arm, arm.metric): arm.median for arm in arms}
    assert found == {
        ("plain", "allocated_peak_gib"): 2.0,
        ("half", "allocated_peak_gib"): 1.0,
        ("half", "allocated_peak_change_pct"): pytest.approx(-50.0),
    }


def test_the_probe_sees_what_checkpointing_and_an_average_do():
    model = "wideresnet(depth=10, width=2)"
    plain, checkpointed, averaged = (
        _lever_memory_probe.probe(values, 8, 16, "cpu", model)["allocated_peak_gib"]
        for values in ({}, {"speed": {"activation_checkpointing": True}}, {"optim": {"ema": 0.9}})
    )
    weights_gib = sum(p.numel() for p in build_model(model).parameters()) * 4 / 2**30
    assert averaged - plain == pytest.approx(weights_gib, rel=0.05)
    assert checkpointed < plain
