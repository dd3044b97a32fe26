"""Flags parsed and checked, and the memory limits that follow from them."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.unit.tuner import tuner_cases
from tests.unit.tuner.tuner_cases import GIB

from fulltilt.config import config_from_values
from fulltilt.errors import UsageError
from fulltilt.records import Device
from fulltilt.tuner.question.default_budget import compute_default_s
from fulltilt.tuner.question.options import (
    RANK_START_S,
    build_options,
    find_limits,
    note_ranks,
)

SMALL, LARGE = (Device(name="gpu", type="cuda", memory_total_bytes=n * GIB) for n in (8, 24))
MACHINE = dataclasses.replace(tuner_cases.MACHINE, devices=(SMALL, LARGE))
TWO_RANKS = config_from_values({"run": {"device": "cpu", "n_ranks": 2}}, base_dir=".")


def build(config=None, **flags):
    return build_options(config or config_from_values({}, base_dir="."), **({"device": "cpu"} | flags))


def test_steps_and_the_device_come_from_the_configuration_unless_a_flag_says_otherwise():
    config = config_from_values({"benchmark": {"steps_per_test": 7}, "run": {"device": "cpu"}}, base_dir=".")
    assert (build(config, device=None).n_steps, build(config, device=None).device) == (7, "cpu")
    options = build(config, steps=3, memory_limit="12GiB", budget="6m")
    assert (options.n_steps, options.memory_limit_bytes, options.budget_s) == (3, 12 * GIB, 360.0)


def test_quick_has_a_budget_and_no_deadline_beyond_it():
    assert (build(quick=True).strategy, build(quick=True).budget_s) == ("quick", 90.0)
    assert build(quick=True, budget="3m").budget_s == 180.0
    assert build(budget=20.0).deadline_s == build().deadline_s == 120.0, "a trial's is cut to what is left of it"
    assert build(budget=20.0, deadline="5m").deadline_s == 300.0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"batch_sizes": [0]}, "--batch-sizes 0 cannot be tried"),
        ({"batch_sizes": [8, 2.5]}, "2.5"),
        ({"num_workers": [-1]}, "--num-workers -1"),
        ({"steps": True}, "--steps True"),
        ({"batch_sizes": "32"}, "--batch-sizes '32' cannot be tried; give a list of whole numbers of at"),
        ({"batch_sizes": []}, r"--batch-sizes \[\] cannot be tried"),
        ({"num_workers": 2}, "--num-workers 2 cannot be tried; give a list"),
        ({"budget": math.inf}, "--budget inf is no quantity; give a number, or text with a unit"),
        ({"budget": math.nan}, "--budget nan is no quantity"),
        ({"budget": True}, "--budget True is no quantity"),
        ({"deadline": [5]}, r"--deadline \[5\] is no quantity"),
        ({"memory_limit": math.inf}, "--memory-limit inf is no quantity"),
        ({"exhaustive": True, "quick": True}, "contradict"),
        ({"lr_rule": "cubic"}, "--lr-rule cubic is unknown; valid: sqrt, linear, none"),
        ({"budget": 0.0}, "--budget 0.0 leaves no time"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"budget": "3x"}, "--budget '3x' is not a duration"),
        ({"memory_limit": "a lot"}, "--memory-limit 'a lot' is not a size in bytes"),
        ({"deadline": 0}, "--deadline 0 leaves a trial no time"),
        ({"memory_limit": "12"}, "--memory-limit 12 is 12 bytes, in which nothing runs; write a unit"),
    ],
)
def test_bad_flags_say_the_value(flags, words):
    with pytest.raises(UsageError, match=words) as caught:
        build(**flags)
    assert caught.value.exit_code == 2


WSL, BOXED = dataclasses.replace(MACHINE, is_wsl=True), dataclasses.replace(MACHINE, memory_limit_bytes=2 * GIB)
ON_CPU, TWO_CPUS = {"device": "cpu"}, {"device": "cpu", "rank_devices": ("cpu", "cpu")}
ON_GPU, TWO_GPUS = {"device": "cuda:1"}, {"device": "cuda:1", "rank_devices": ("cuda:1", "cuda:0")}
USABLE = 0.95  # of a GPU's memory under WSL, before the driver spills


@pytest.mark.parametrize(
    ("where", "asked_gib", "machine", "trial_gib", "pick_gib"),
    [
        (ON_CPU, 4, MACHINE, 4, 4.0),
        # a tenth of what is free is kept, and the cgroup minded
        (ON_CPU, None, MACHINE, 0.9 * 20, 32.0),
        (ON_CPU, None, BOXED, 0.9 * 2, 2.0),
        # ranks divide the memory of a CPU, and a limit that is asked for is each one's
        (TWO_CPUS, None, MACHINE, 0.9 * 10, 16.0),
        (TWO_CPUS, 4, MACHINE, 4, 4.0),
        # a GPU is limited only where it would spill, and then below that
        (ON_GPU, None, MACHINE, None, 24.0),
        (ON_GPU, None, WSL, USABLE * 24, USABLE * 24),
        (ON_GPU, 24, WSL, USABLE * 24, USABLE * 24),
        (ON_GPU, 12, WSL, 12, 12.0),
        (ON_GPU, 24, MACHINE, 24, 24.0),
        ({"device": "cuda:7"}, None, MACHINE, None, None),
        # of several the smallest counts
        (TWO_GPUS, None, MACHINE, None, 8.0),
        (TWO_GPUS, None, WSL, USABLE * 8, USABLE * 8),
        (TWO_GPUS | {"rank_devices": ("cuda:0", "cuda:7")}, None, MACHINE, None, None),
    ],
)
def test_memory_limits_of_trials_and_picks_follow_from_flag_and_machine(where, asked_gib, machine, trial_gib, pick_gib):
    options = dataclasses.replace(build(), **where, memory_limit_bytes=asked_gib and asked_gib * GIB)
    limit_bytes, memory_gib = find_limits(options, machine)
    assert limit_bytes == (trial_gib and int(trial_gib * GIB))
    assert memory_gib == (pick_gib and pytest.approx(pick_gib, abs=1e-9))


def test_a_search_over_ranks_takes_the_devices_of_train_has_longer_deadlines_and_says_what_its_figures_are_of():
    assert build(TWO_RANKS, device=None).rank_devices == ("cpu", "cpu")
    with pytest.raises(UsageError, match="leave n_ranks out, or name as many devices"):
        build(config_from_values({"run": {"device": [0, 1], "n_ranks": 3}}, base_dir="."), device=None)
    assert build(TWO_RANKS).deadline_s == 120.0 + RANK_START_S
    assert build(TWO_RANKS, deadline="7s").deadline_s == 7.0
    (note,) = note_ranks(build(TWO_RANKS))
    assert "measured in 2 processes (cpu, cpu)" in note
    assert (build().rank_devices, note_ranks(build())) == ((), ())


def test_a_search_has_three_minutes_unless_told_otherwise_and_one_that_runs_all_has_no_end():
    assert (build().budget_s, build().is_budget_default) == (180.0, True)
    assert (build(budget="6m").is_budget_default, build(quick=True).is_budget_default) == (False, False)
    assert (build(exhaustive=True).budget_s, build(exhaustive=True).is_budget_default) == (None, False)
    assert build(exhaustive=True, budget="1m").budget_s == 60.0
    assert compute_default_s(run_s=6.0) == 180.0
    assert compute_default_s(run_s=60.0) == 25 * 60.0


def test_values_named_by_flags_all_run_and_those_of_the_configuration_are_searched():
    named = build(named_only=True, batch_sizes=[16, 32])
    assert (named.strategy, named.budget_s, named.named_only) == ("exhaustive", None, True)
    assert (build(named_only=True).strategy, build(named_only=True).budget_s) == ("model_first", 180.0)
    assert build(named_only=True, num_workers=[0], quick=True).strategy == "quick"
