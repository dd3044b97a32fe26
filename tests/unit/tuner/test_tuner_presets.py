"""The presets: one for every card and model size, each a configuration that builds, steps and can be searched."""

import re
from pathlib import Path

import pytest

from fulltilt.config import load_config, parse_bytes, parse_call, plan_of
from fulltilt.data import make_sensor_hdf5
from fulltilt.engine.check.checklist import run_checks
from fulltilt.levers import Facts
from fulltilt.tuner.question.space import build_space

PRESETS = Path(__file__).parents[3] / "configs" / "presets"
MODELS = {"small": (3, 16), "medium": (6, 64), "large": (12, 128)}
MEMORY_GB = (80, 40, 24, 12, 8)
GUIDE = {
    "80gb-small": (4096, 1, 12, 3e-4),
    "80gb-medium": (1024, 1, 12, 2e-4),
    "80gb-large": (256, 4, 8, 1.5e-4),
    "40gb-small": (2048, 1, 8, None),
    "40gb-medium": (512, 2, 8, None),
    "24gb-small": (1024, 1, 6, None),
    "24gb-medium": (256, 4, 4, None),
}
"""What the guide's tables state: batch, accumulation, workers, learning rate where it gives one."""
NAMES = [f"{memory}gb-{size}" for memory in MEMORY_GB for size in MODELS]
CHECKED = [name if name.startswith("8gb") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def load_preset(name, words=()):
    return load_config(PRESETS / f"{name}.yaml", words)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_what_its_name_says(name):
    assert sorted(path.stem for path in PRESETS.iterdir()) == sorted(NAMES)
    config, text = load_preset(name), (PRESETS / f"{name}.yaml").read_text()
    memory, size = name.split("gb-")
    depth, hidden = MODELS[size]
    assert parse_call(config.model).kwargs == {"depth": depth, "hidden": hidden, "heads": 8}
    assert parse_bytes(re.search(r"--memory-limit (\S+)", text).group(1)) == int(memory) * 2**30
    assert text.count(f"configs/presets/{name}.yaml") == 3
    plan = plan_of(config)
    assert f"{plan['batch_size']} × {plan['accumulate']} = {plan.effective_batch_size}" in text
    if name in GUIDE:
        *levers, rate = GUIDE[name]
        assert [plan[lever] for lever in ("batch_size", "accumulate", "num_workers")] == levers
        assert config.speed.precision == "auto"  # use_amp: true
        assert rate in (None, config.optim.lr)


@pytest.mark.parametrize("size", MODELS)
def test_a_smaller_card_gets_a_smaller_micro_batch_and_from_24_gb_on_the_same_recipe(size):
    plans = [plan_of(load_preset(f"{memory}gb-{size}")) for memory in MEMORY_GB]
    batches = [plan["batch_size"] for plan in plans]
    assert batches == sorted(set(batches), reverse=True)
    assert len({plan.effective_batch_size for plan in plans[2:]}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_search_from_a_preset_keeps_the_effective_batch_and_holds_the_presets_own(name):
    facts = Facts(device_type="cuda", compute_capability=(8, 0), n_cores_usable=16, n_samples=178_000,
                  n_checkpointable=12, optimizer="AdamW", has_conv=False, has_any_conv=False)  # fmt: skip
    space = build_space(load_preset(name), facts)
    assert {plan.effective_batch_size for plan in space.grid()} == {space.user_plan.effective_batch_size}
    assert len(space.axes["batch_size"]) > 3
    for lever in ("batch_size", "num_workers"):
        assert space.user_plan[lever] in space.axes[lever]


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return make_sensor_hdf5(tmp_path_factory.mktemp("events") / "events.h5", 4600, n_sensors=4)


@pytest.mark.parametrize("name", CHECKED)
def test_a_preset_passes_the_check(name, events, tmp_path):
    """With 4 sensors instead of 5,160 and one micro-step a window: what is checked is that it builds and steps."""
    words = [f"data.path={events}", "speed.accumulate=1", "data.num_workers=0", "run.device=cpu"]
    items = run_checks(load_preset(name, words), device="cpu", out_dir=tmp_path)
    assert [item.text for item in items if item.verdict == "problem"] == []
    assert any(item.name == "one step" and "samples forward" in item.text for item in items)
