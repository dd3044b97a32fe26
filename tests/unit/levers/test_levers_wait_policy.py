"""How threads wait for each other: seen in processes of their own, which is where it can be chosen."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tests.unit.levers.wait_cases import N_WAITS, clean_environment, wait

from fulltilt.levers import Facts, Setup, default_plan, find_obstacles, list_environment, load_catalogue
from fulltilt.tuner.question.space import Space, canonicalize

NEEDS_TWO_CORES = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="threads on one core always sleep")


@pytest.mark.slow
@NEEDS_TWO_CORES
def test_a_passive_thread_sleeps_at_once_an_active_one_never_and_by_default_it_spins_first():
    passive, active, usual = wait("passive"), wait("active"), wait(None)
    assert (passive["observed"], active["observed"], usual["observed"]) == ("passive", "active", None)
    assert passive["n_sleeps"] >= N_WAITS / 2 > active["n_sleeps"]
    assert passive["busy_ms"] < usual["busy_ms"] / 3 < active["busy_ms"]  # of CPU time, whatever else runs
    assert passive["notes"] == active["notes"] == usual["notes"] == []


@pytest.mark.slow
@NEEDS_TWO_CORES
def test_the_same_is_learned():
    assert wait("passive")["losses"] == wait("active")["losses"] == wait(None)["losses"]


OBSERVE = """
import json, os, sys
from types import SimpleNamespace
from fulltilt.levers import Setup, default_plan, list_environment, load_catalogue, set_before_torch

(value, is_late), lever = json.loads(sys.argv[1]), load_catalogue()["wait_policy"]
if is_late:  # torch is loaded before the plan is known, as in a notebook
    import torch
set_before_torch(list_environment(default_plan({"wait_policy": value})))
setup = Setup(device=SimpleNamespace(type="cpu"))
lever.apply(setup, value)
print(json.dumps([lever.observe(setup), setup.notes, os.environ.get("OMP_WAIT_POLICY")]))
"""


def observe(value, *, is_late=False, **environment):
    """What a process says of the value of its plan: what is in force, the notes, and its variable."""
    command = [sys.executable, "-c", OBSERVE, json.dumps((value, is_late))]
    done = subprocess.run(command, env=clean_environment() | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_where_torch_is_loaded_already_it_is_said_and_the_environment_is_left_alone():
    observed, (note,), variable = observe("passive", is_late=True)
    assert (observed, variable) == (None, None)
    assert "wait_policy=passive is not in force, the default of OpenMP is" in note
    assert "start this process with OMP_WAIT_POLICY=passive GOMP_SPINCOUNT=0" in note


@pytest.mark.parametrize(
    ("environment", "value", "observed"),
    [
        ({"OMP_WAIT_POLICY": " PASSIVE"}, None, "passive"),
        ({"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "100000"}, None, None),  # the count overrules the policy
        ({"GOMP_SPINCOUNT": "100000"}, "passive", "passive"),
    ],
)
def test_what_the_environment_says_is_read_and_a_plans_value_overrules_it(environment, value, observed):
    assert observe(value, **environment)[:2] == [observed, []]


def test_one_thread_waits_for_nobody_and_such_plans_are_one():
    cpu = Facts(device_type="cpu", n_cores_usable=4)
    passive = default_plan({"wait_policy": "passive"})
    assert find_obstacles(passive, cpu) == []
    for plan, facts in (
        (passive.replace(threads=1), cpu),
        (passive, Facts(device_type="cpu", n_cores_usable=1)),
        (passive, Facts(device_type="cpu", n_cores_usable=4, n_threads=1)),  # OMP_NUM_THREADS=1
    ):
        assert "one thread" in find_obstacles(plan, facts)[0]
        assert canonicalize(plan, facts)["wait_policy"] is None
    axes = {"threads": (None, 1), "wait_policy": (None, "passive"), "thread_affinity": (False, True)}
    base = default_plan({"batch_size": 8})
    assert len(Space(axes=axes, base=base, user_plan=base, facts=cpu).grid()) == 5, "four, and one with one thread"


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        (Facts(device_type="cpu", n_cores_usable=4), (None, "passive")),
        (Facts(device_type="cpu", n_cores_usable=4, n_threads=1), (None,)),
        (Facts(device_type="cuda", n_cores_usable=4), (None,)),
    ],
)
def test_to_sleep_is_offered_where_threads_wait_and_to_spin_never(facts, values):
    assert load_catalogue()["wait_policy"].candidates(facts) == values


def test_only_values_that_were_asked_for_change_an_environment():
    assert list_environment(default_plan()) == {}
    wanted = list_environment(default_plan({"wait_policy": "active"}))
    assert wanted == {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "infinity"}


def test_on_a_gpu_nothing_is_said():
    lever, setup = load_catalogue()["wait_policy"], Setup(device=torch.device("cuda"))
    lever.apply(setup, "passive")
    assert setup.notes == []
