"""What a search may ask for: plans one step from another, and none that cannot run."""

from __future__ import annotations

import dataclasses

from fulltilt.levers import Facts, default_plan, find_obstacles
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.model.candidates import Candidates

BASE = default_plan({"batch_size": 32})
AXES = {
    "batch_size": (16, 32, 64),
    "num_workers": (0, 1, 2),
    "persistent_workers": (False, True),
    "prefetch_factor": (None, 4),
    "fused_optimizer": (False, True),
}
SPACE = Space(axes=AXES, base=BASE, user_plan=BASE, facts=Facts(device_type="cpu", n_cores_usable=2, optimizer="AdamW"))


def list_neighbours(plan):
    return Candidates(SPACE, BASE).list_neighbours(plan, AXES)


def test_neighbours_move_by_one_on_ordered_axes_to_every_value_of_a_switch_and_can_run():
    for plan in (BASE, SPACE.with_value(BASE, "num_workers", 1)):
        assert list_neighbours(plan)
        assert not any(find_obstacles(near, SPACE.facts) for near in list_neighbours(plan))
    assert not any(near["persistent_workers"] or near["prefetch_factor"] for near in list_neighbours(BASE))
    plan = SPACE.with_value(BASE, "num_workers", 1)
    changed = {(name, near[name]) for near in list_neighbours(plan) for name in AXES if near[name] != plan[name]}
    assert {("batch_size", 16), ("batch_size", 64), ("num_workers", 2), ("num_workers", 0)} <= changed
    assert {("persistent_workers", True), ("prefetch_factor", 4), ("fused_optimizer", True)} <= changed
    # the next number of workers is the next larger one in whatever order they were named
    space = dataclasses.replace(SPACE, axes={**AXES, "num_workers": (8, 0, 4)})
    found = Candidates(space, BASE).list_neighbours(BASE.replace(num_workers=8), ["num_workers"])
    assert [near["num_workers"] for near in found] == [4]


def test_onward_is_one_more_step_the_same_way_and_never_off_the_axis():
    candidates = Candidates(SPACE, BASE)
    first, middle, last = (SPACE.with_value(BASE, "batch_size", size) for size in AXES["batch_size"])
    assert candidates.list_onward(first, middle) == [last]
    assert candidates.list_onward(last, middle) == [first]
    assert candidates.list_onward(middle, last) == []
    assert candidates.list_onward(first, SPACE.with_value(middle, "num_workers", 1)) == [], "two levers moved"
    assert candidates.list_onward(BASE, SPACE.with_value(BASE, "fused_optimizer", True)) == []
    fewer, more = (SPACE.with_value(BASE, "num_workers", count) for count in (0, 1))
    assert [plan["num_workers"] for plan in candidates.list_onward(fewer, more)] == [2]
