"""placement: what fits, what is refused and why."""

import pytest
from tests.unit.levers.lever_cases import CATALOGUE

from fulltilt.config import config_from_values
from fulltilt.levers import Facts, default_plan, find_notes, find_obstacles
from fulltilt.levers.placement import choose_placement, resolve
from fulltilt.tuner.question.space import build_space

LEVER = CATALOGUE["placement"]
GIB = 2**30
ALL = ("stream", "block_shuffled", "ram", "memory_map", "device")


def make_facts(**changes):
    memory = {"data_bytes": 7 * GIB, "free_ram_bytes": 64 * GIB, "free_device_bytes": 24 * GIB}
    return Facts(**({"device_type": "cuda", "placements": ALL, "n_blocks_mixed": 64} | memory | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("stream", "memory_map", "ram", "device")),
        ({"free_device_bytes": 12 * GIB}, ("stream", "memory_map", "ram")),
        ({"free_device_bytes": 12 * GIB, "free_ram_bytes": 13 * GIB}, ("stream", "memory_map")),
        ({"placements": ("stream", "block_shuffled", "ram")}, ("stream", "ram")),
        ({"placements": ("stream",), "data_bytes": None}, ("stream",)),
        ({"device_type": "cpu", "free_device_bytes": None}, ("stream", "memory_map", "ram")),
    ],
)
def test_candidates_are_what_fits_and_leaves_the_order_alone(changes, expected):
    facts = make_facts(**changes)
    assert LEVER.candidates(facts) == expected
    for value in expected:
        assert find_obstacles(default_plan({"placement": value}), facts) == []


def test_what_changes_the_recipe_and_that_no_search_tries_an_order_of_blocks_unasked():
    assert [value for value in ALL if LEVER.changes_recipe(value)] == ["block_shuffled"]
    assert not any(LEVER.changes_recipe(value) for value in LEVER.candidates(make_facts()))
    facts = make_facts(n_samples=1000, is_iterable=False)
    axes = build_space(config_from_values({}, base_dir="."), facts, all_levers=True).axes
    assert axes["placement"] == ("stream", "memory_map", "ram", "device")
    assert all(CATALOGUE[name].changes_recipe(value) for name in ("batch_size", "accumulate") for value in (1, 64))
    assert not CATALOGUE["num_workers"].changes_recipe(4)


@pytest.mark.parametrize(
    ("plan", "changes", "words"),
    [
        ({"placement": "ram"}, {"free_ram_bytes": 12 * GIB}, "take 7.00 GiB and the host has 12.00 GiB free, of which"),
        ({"placement": "ram"}, {"free_ram_bytes": 12 * GIB}, "use placement memory_map or block_shuffled"),
        ({"placement": "device"}, {"free_device_bytes": 8 * GIB}, "the device has 8.00 GiB free, of which 50%"),
        ({"placement": "device"}, {"device_type": "cpu"}, "use placement ram"),
        ({"placement": "device", "num_workers": 2}, {}, "set num_workers to 0"),
        ({"placement": "device", "pin_memory": True}, {}, "set pin_memory to false"),
        ({"placement": "ram"}, {"placements": ("stream",)}, "no table of rows"),
        ({"placement": "memory_map"}, {"placements": ("stream", "block_shuffled", "ram")}, "are compressed"),
        ({"placement": "device"}, {"placements": ("stream", "ram")}, "run in host memory; use stream or ram"),
        ({"placement": "disk"}, {}, "valid: stream, memory_map, ram, device, block_shuffled"),
    ],
)
def test_values_that_cannot_apply_say_why_with_figures(plan, changes, words):
    reasons = find_obstacles(default_plan(plan), make_facts(**changes))
    assert len(reasons) == 1
    assert words in reasons[0]


@pytest.mark.parametrize("value", ALL)
def test_what_is_not_known_yet_passes(value):
    assert find_obstacles(default_plan({"placement": value}), Facts(device_type="cuda")) == []


def test_an_order_of_blocks_and_a_stream_that_need_not_be_one_are_noted():
    blocks = find_notes(default_plan({"placement": "block_shuffled", "batch_size": 257}), make_facts())[0]
    assert "64 blocks" in blocks
    assert "up to 5.00 times" in blocks, "how far from a full shuffle it can be"
    stream = find_notes(default_plan(), make_facts(free_device_bytes=8 * GIB))[0]
    assert "7.00 GiB in memory, and placement ram could apply" in stream
    assert find_notes(default_plan(), make_facts(placements=("stream",), data_bytes=None)) == []


@pytest.mark.parametrize(
    ("changes", "plan", "expected", "n_refused"),
    [
        ({}, {}, "device", 0),
        ({}, {"num_workers": 2}, "ram", 1),
        ({"free_device_bytes": 8 * GIB}, {}, "ram", 1),
        ({"free_device_bytes": 8 * GIB, "free_ram_bytes": 10 * GIB}, {}, "memory_map", 2),
        ({"free_device_bytes": 8 * GIB, "free_ram_bytes": 6 * GIB}, {}, "block_shuffled", 3),
        ({"placements": ("stream",), "data_bytes": None}, {}, "stream", 4),
    ],
)
def test_the_fastest_placement_that_fits_is_chosen_and_the_faster_ones_say_why_not(changes, plan, expected, n_refused):
    value, reasons = choose_placement(default_plan(plan), make_facts(**changes))
    assert value == expected
    assert len(reasons) == n_refused
    assert all(reason.split(": ", 1)[1] for reason in reasons)


@pytest.mark.parametrize(
    ("value", "changes", "options", "expected", "said"),
    [
        ("ram", {}, {}, "ram", None),
        ("auto", {}, {}, "device", "auto is device"),
        ("auto", {"free_device_bytes": 8 * GIB}, {}, "ram", "auto is ram; faster ones cannot apply: the rows take 7"),
        ("auto", {}, {"may_hold": False}, "memory_map", "data.on_bad_sample skip does not go with it"),
        ("auto", {"device_type": "cpu", "is_held": True}, {}, "stream", "lie in host memory already"),
        ("auto", {"placements": ("stream",), "data_bytes": None}, {}, "stream", "no table of rows"),
        ("auto", {}, {"started_with": "ram"}, "ram", "auto goes on as ram"),
        ("auto", {"free_ram_bytes": GIB}, {"started_with": "ram"}, "device", "auto is device"),
    ],
)
def test_auto_is_the_fastest_that_fits_with_the_reason(value, changes, options, expected, said):
    chosen, note = resolve(value, default_plan(), make_facts(**changes), **options)
    assert chosen == expected
    assert note is None if said is None else said in note
