"""What a search may try: axes by precedence, plans that come to the same, the effective batch."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.config import config_from_values
from fulltilt.errors import ConfigError
from fulltilt.levers import Facts, find_obstacles
from fulltilt.tuner.question.space import build_space, canonicalize, suggest_divisors

CPU = Facts(device_type="cpu", n_cores_usable=4, n_samples=10_000, is_iterable=False, has_native_bf16=False)
GPU = dataclasses.replace(CPU, device_type="cuda", compute_capability=(8, 0), has_native_bf16=True)


def build_config(**sections):
    return config_from_values(sections, base_dir=".")


HELD = dataclasses.replace(
    GPU, placements=("stream", "ram", "device"), transforms="pipeline", data_bytes=1, free_ram_bytes=100,
    free_device_bytes=100,
)  # fmt: skip


def test_flags_win_over_the_configuration_which_wins_over_suggestions():
    config = build_config(benchmark={"batch_sizes": [8], "num_workers_options": [3]})
    flags, configured = build_space(config, CPU, batch_sizes=[64, 32], num_workers=[1, 0]), build_space(config, CPU)
    assert (flags.axes["batch_size"], flags.axes["num_workers"]) == ((32, 64), (1, 0))
    assert (configured.axes["batch_size"], configured.axes["num_workers"]) == ((8,), (3,))
    # and it starts at the value nearest to the user's
    config = build_config(data={"num_workers": 3})
    assert build_space(config, CPU, num_workers=[0, 4, 8]).base["num_workers"] == 4
    assert build_space(config, CPU, num_workers=[8, 1, 5]).base["num_workers"] == 1, "of two as near the smaller"


@pytest.mark.parametrize(("batch_size", "accumulate"), [(256, 1), (64, 4), (48, 2), (97, 1), (1, 1), (100, 3)])
def test_without_names_the_effective_batch_is_kept_exactly(batch_size, accumulate):
    config = build_config(data={"batch_size": batch_size}, speed={"accumulate": accumulate})
    space = build_space(config, CPU)
    assert {plan.effective_batch_size for plan in space.grid()} == {batch_size * accumulate}
    assert batch_size in space.axes["batch_size"]


@given(st.integers(1, 5000))
def test_divisors_divide_ascend_and_hold_the_whole(effective):
    values = suggest_divisors(effective)
    assert not any(effective % value for value in values)
    assert list(values) == sorted(set(values))
    assert (values[-1], len(values) <= 6) == (effective, True)


def test_a_free_batch_doubles_from_the_users_up_to_the_dataset_and_named_ones_keep_the_users_accumulate():
    space = build_space(build_config(data={"batch_size": 2000}), CPU, free_batch=True)
    assert space.axes["batch_size"] == (1000, 2000, 4000, 8000)
    named = build_space(build_config(data={"batch_size": 64}, speed={"accumulate": 4}), CPU, batch_sizes=[32, 128])
    assert {(plan["batch_size"], plan["accumulate"]) for plan in named.grid()} == {(32, 4), (128, 4)}
    assert (space.effective_batch_size, named.effective_batch_size) == (None, None)


def test_precision_and_pin_axes_follow_the_machine_and_what_is_asked():
    on_gpu = build_space(build_config(), GPU).axes
    assert (on_gpu["precision"], on_gpu["pin_memory"]) == (("fp32", "tf32", "bf16"), (False, True))
    off = build_config(benchmark={"test_mixed_precision": False, "test_pin_memory": False})
    for axes in (build_space(build_config(), CPU).axes, build_space(off, GPU).axes):
        assert {"precision", "pin_memory"}.isdisjoint(axes)
    asked = build_space(build_config(benchmark={"test_mixed_precision": True}), CPU)
    assert asked.axes["precision"] == ("fp32", "bf16"), "tried even where it is emulated"


def test_a_value_that_can_apply_in_no_plan_is_one_skipped_row_with_its_reason():
    config = build_config(benchmark={"batch_sizes": [8, 20_000], "num_workers_options": [0], "test_pin_memory": True})
    space = build_space(config, CPU)
    assert all(not find_obstacles(plan, CPU) for plan in space.grid())
    reasons = [reason for _, reason in space.skipped]
    assert any(reason.startswith("batch_size=20000: larger than the dataset") for reason in reasons)
    assert any(reason.startswith("pin_memory=True: there is no accelerator") for reason in reasons)
    assert len(reasons) == 2
    space = build_space(build_config(), dataclasses.replace(CPU, n_ranks=4), batch_sizes=[2, 8])
    ((_, reason),) = [row for row in space.skipped if row[0]["batch_size"] == 2]
    assert "over all 4 ranks, and some would get no sample" in reason
    space = build_space(build_config(), CPU, batch_sizes=[50_000])
    assert (space.axes, [plan["batch_size"] for plan, _ in space.skipped]) == ({}, [50_000])


def test_values_that_need_another_lever_collapse_instead_of_being_run_twice():
    levers = {"persistent_workers": [False, True]}
    benchmark = {"batch_sizes": [8], "num_workers_options": [0, 2], "test_mixed_precision": False, "levers": levers}
    space = build_space(build_config(benchmark=benchmark), CPU)
    made = [(plan["num_workers"], plan["persistent_workers"]) for plan in space.grid()]
    assert made == [(0, False), (2, False), (2, True)]
    assert space.n_combinations - len(made) == 1


def test_the_grid_holds_its_own_plans_and_no_others():
    benchmark = {"batch_sizes": [8, 16], "num_workers_options": [0, 4], "levers": {"prefetch_factor": [4, 8]}}
    space = build_space(build_config(data={"batch_size": 8}, benchmark=benchmark), CPU)
    grid = space.grid()
    assert {plan["prefetch_factor"] for plan in grid if plan["num_workers"] == 0} == {None}
    assert all(space.holds(plan) for plan in grid)
    assert space.holds(space.user_plan)
    busy = next(plan for plan in grid if plan["num_workers"] == 4)
    others = [busy.replace(threads=1), busy.replace(accumulate=2), busy.replace(batch_size=32)]
    assert not any(map(space.holds, [*others, busy.replace(prefetch_factor=None), busy.replace(num_workers=2)]))


@pytest.mark.parametrize(
    ("facts", "sections", "lever", "value", "said"),
    [
        (CPU, {"data": {"pin_memory": True}}, "pin_memory", False, "pin_memory=True of the configuration cannot apply"),
        (CPU, {"use_amp": True}, "precision", "fp32", "emulated"),
        (GPU, {"use_amp": True}, "precision", "bf16", ""),
        # the transforms of the plan run in the loader
        (HELD, {"data": {"placement": "auto"}}, "placement", "ram", "placement: auto is ram"),
    ],
)
def test_the_users_own_impossible_or_automatic_value_is_replaced_and_said(facts, sections, lever, value, said):
    space = build_space(build_config(**sections), facts)
    assert space.user_plan[lever] == value
    assert said in "; ".join(space.notes)


WORKERS = {"num_workers": 4, "pin_memory": True}


def test_rows_on_the_device_bring_what_they_need_with_them():
    space = build_space(build_config(data=WORKERS), HELD, all_levers=True)
    assert "device" in space.axes["placement"]
    assert not [reason for _, reason in space.skipped if reason.startswith("placement")]
    moved = space.with_value(space.user_plan, "placement", "device")
    assert not find_obstacles(moved, HELD)
    levers = ("placement", "num_workers", "pin_memory", "transforms")
    assert [moved[name] for name in levers] == ["device", 0, False, "device"]
    back = space.with_value(moved, "num_workers", 2)
    assert (back["placement"], back["num_workers"]) == ("stream", 2)
    # what the user left out of the search is not brought back
    space = build_space(build_config(data=WORKERS), HELD, num_workers=[2, 4], all_levers=True)
    assert "device" not in space.axes["placement"]
    assert any(reason.startswith("placement=device: ") for _, reason in space.skipped)
    assert space.with_value(space.user_plan, "placement", "device")["num_workers"] == 4


@pytest.mark.parametrize(
    ("levers", "said"), [({"chanels_last": [True]}, "channels_last"), ({"num_workers": [1]}, "num_workers_options")]
)
def test_a_lever_that_is_unknown_or_has_its_own_key_is_refused_with_the_name_to_give(levers, said):
    with pytest.raises(ConfigError, match=said):
        build_space(build_config(benchmark={"levers": levers}), CPU)


@given(st.sampled_from([0, 1, 2]), st.booleans(), st.sampled_from([None, 2, 4]), st.booleans())
def test_canonical_plans_are_stable_and_free_of_obstacles(workers, persistent, prefetch, pin):
    base = build_space(build_config(), CPU, batch_sizes=[8]).base
    plan = base.replace(num_workers=workers, persistent_workers=persistent, prefetch_factor=prefetch, pin_memory=pin)
    made = canonicalize(plan, CPU)
    assert not find_obstacles(made, CPU)
    assert canonicalize(made, CPU) == made
    assert made["num_workers"] == workers


CONV = Facts(device_type="cuda", n_cores_usable=4, compute_capability=(8, 0), has_conv=True, n_checkpointable=3)
FURTHER = {"compile", "channels_last", "activation_checkpointing", "cudnn_benchmark"}


def test_a_search_that_can_afford_it_tries_every_lever_that_may_help():
    space = build_space(build_config(), CONV, all_levers=True)
    assert FURTHER | {"prefetch_factor", "persistent_workers"} <= set(space.axes)
    assert "accumulate" not in space.axes, "that is the recipe"
    assert {*FURTHER, "prefetch_factor"}.isdisjoint(build_space(build_config(), CONV).axes)
    facts = Facts(device_type="cpu", n_cores_usable=4, has_conv=False, n_checkpointable=0, has_c_compiler=False)
    assert FURTHER.isdisjoint(build_space(build_config(), facts, all_levers=True).axes), "these cannot apply"


@pytest.mark.parametrize("levers", [{}, {"compile": [False, True]}])
def test_levers_that_are_named_are_the_only_ones(levers):
    space = build_space(build_config(benchmark={"levers": levers}), CONV, all_levers=True)
    assert set(space.axes) - {"batch_size", "num_workers", "precision", "pin_memory"} == set(levers)


def test_a_space_of_what_is_named_holds_nothing_that_was_only_suggested():
    asked = build_config(benchmark={"test_mixed_precision": True, "test_pin_memory": True})
    given = {"batch_sizes": [16, 32, 64], "num_workers": [0, 1], "named_only": True, "all_levers": True}
    assert len(build_space(asked, CPU, **given).grid()) == 12
    assert build_space(asked, GPU, **given).n_combinations == 3 * 2 * 3 * 2
    on_gpu = build_space(build_config(), GPU, **given).axes
    assert on_gpu == {"batch_size": (16, 32, 64), "num_workers": (0, 1)}
    own = build_config(data={"batch_size": 48, "num_workers": 3})
    assert build_space(own, GPU, named_only=True).axes == {"batch_size": (48,), "num_workers": (3,)}
    levers = build_config(benchmark={"levers": {"channels_last": [False, True]}})
    assert "channels_last" in build_space(levers, GPU, named_only=True).axes
