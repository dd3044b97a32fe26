"""The size of a grid without making it: the same number as making it gives."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.config import config_from_values
from fulltilt.levers import Facts, default_plan, load_catalogue
from fulltilt.tuner.question import grid_size
from fulltilt.tuner.question import space as space_module
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.space import COUNTABLE, Space, build_space

GPU = Facts(
    device_type="cuda", compute_capability=(8, 0), n_cores_usable=4, n_samples=10_000, is_iterable=False,
    has_native_bf16=True, transforms="pipeline",
)  # fmt: skip
VALUES = {
    "num_workers": [0, 2, 4], "persistent_workers": [False, True], "prefetch_factor": [None, 2, 4],
    "worker_threads": [1, 2], "placement": ["stream", "ram", "device"], "pin_memory": [False, True],
    "transforms": ["loader", "device"], "device_prefetch": [False, True], "deterministic": [False, True],
    "cudnn_benchmark": [False, True], "compile": [False, True, "max-autotune"], "precision": ["fp32", "bf16"],
    "batch_size": [8, 16, 32], "channels_last": [False, True],
}  # fmt: skip


def choose(values):
    return st.lists(st.sampled_from(values), min_size=1, unique_by=repr).map(tuple)


@st.composite
def draw_spaces(draw):
    """Up to five levers, of which some are reset by others; a base that may itself have to give way."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5, unique=True))
    base = default_plan({name: draw(st.sampled_from(values)) for name, values in VALUES.items()})
    effective = draw(st.sampled_from([None, 32]))
    facts = draw(st.sampled_from([GPU, dataclasses.replace(GPU, device_type="cpu", compute_capability=None)]))
    axes = {name: draw(choose(VALUES[name])) for name in names}
    return Space(axes=axes, base=base, user_plan=base, facts=facts, effective_batch_size=effective)


@given(draw_spaces())
@settings(max_examples=150)
def test_plans_are_counted_as_if_they_were_made(space):
    assert count_grid(space) == len(space.grid())


@pytest.mark.parametrize(
    "read", [lambda plan: True in plan.values(), lambda plan: next(v for k, v in plan.items() if "compile" in k)]
)
def test_a_guard_reads_a_lever_by_looking_at_all_of_a_plan(monkeypatch, read):
    guarded = dataclasses.replace(load_catalogue()["cudnn_benchmark"], obstacle=lambda value, plan, facts: read(plan))
    for module in (grid_size, space_module):
        monkeypatch.setattr(module, "load_catalogue", lambda: {**load_catalogue(), "cudnn_benchmark": guarded})
    axes, base = {"cudnn_benchmark": (False, True), "compile": (False, True)}, default_plan({"batch_size": 8})
    space = Space(axes=axes, base=base, user_plan=base, facts=GPU)
    assert count_grid(space) == len(space.grid())
    assert count_grid(dataclasses.replace(space, axes={})) == 0


@pytest.mark.slow
def test_a_large_grid_is_counted_exactly():
    config = config_from_values({"data": {"batch_size": 64}}, base_dir=".")
    large = build_space(config, GPU, free_batch=True, all_levers=True)
    assert large.n_combinations > COUNTABLE
    assert count_grid(large) == len(large.grid()) < large.n_combinations
