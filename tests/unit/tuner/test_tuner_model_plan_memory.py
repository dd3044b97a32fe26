"""Which plans fit, from fake points, real peaks and refusals of several arms."""

from __future__ import annotations

import dataclasses
import math

import pytest

from fulltilt.levers import default_plan
from fulltilt.records import Measurement
from fulltilt.tuner.search.model.arms import device_arm
from fulltilt.tuner.search.model.plan_memory import PlanMemory
from fulltilt.tuner.trials.rows import build_row

BASE = default_plan({"batch_size": 1})
BATCHES = tuple(2**i for i in range(12))


def make_row(kind, batch, gib, status="ok", **levers):
    plan = BASE.replace(batch_size=batch, **levers)
    measured = Measurement(
        phases_ms=None, samples_per_s=1.0, samples_per_s_ci95=None, block_samples_per_s=(), n_steps=1, n_warmup_steps=0,
        memory_allocated_peak_gib=gib, memory_reserved_peak_gib=None if kind == "memory" else gib,
    )  # fmt: skip
    reason = None if status == "ok" else "no"
    return build_row(
        plan, id="t", why="", kind=kind, status=status, reason=reason, measurement=measured if status == "ok" else None
    )


def learn(*rows, limit_gib=10.0):
    memory = PlanMemory(device_arm(BASE), BATCHES, limit_gib)
    for row in rows:
        memory.learn(row)
    return memory


def fits(memory, batch, **levers):
    return memory.fits(BASE.replace(batch_size=batch, **levers))


FAKES = tuple(make_row("memory", batch, 0.2 + 0.01 * batch) for batch in (1, 64, 2048))


def test_fake_points_alone_keep_a_margin_until_a_real_peak_takes_the_doubt_away():
    memory = learn(*FAKES)
    assert (fits(memory, 256), fits(memory, 512), fits(memory, 1024)) == (True, True, False)
    memory = learn(*FAKES, make_row("device", 512, 5.4), make_row("device", 64, 0.9))
    assert (fits(memory, 512), fits(memory, 1024)) == (True, False)
    assert fits(learn(*FAKES, limit_gib=math.inf), 2048)


def test_an_arm_that_only_fake_tensors_saw_is_read_against_the_users():
    half = [make_row("memory", batch, 0.1 + 0.005 * batch, precision="bf16") for batch in (1, 2048)]
    memory = learn(*FAKES, *half, make_row("device", 512, 5.4), make_row("device", 64, 0.9))
    assert fits(memory, 1024, precision="bf16")
    assert not fits(memory, 2048, precision="bf16")


def test_knowing_nothing_it_goes_up_by_doubling_and_never_to_what_ran_out_of_memory():
    assert fits(learn(), 2048)
    memory = learn(make_row("device", 64, None))
    assert (fits(memory, 128), fits(memory, 256)) == (True, False)
    memory = learn(make_row("device", 64, 1.0), make_row("device", 128, None, status="out_of_memory"))
    assert (fits(memory, 64), fits(memory, 128), fits(memory, 256)) == (True, False, False)
    memory = learn(make_row("loader", 2048, None, status="out_of_memory"))
    assert fits(memory, 2048), "probes of the loader say nothing of memory"


def test_what_fits_is_known_by_a_curve_or_where_there_is_room_for_everything():
    assert not learn().is_known
    assert not learn(FAKES[-1]).is_known
    assert learn(*FAKES).is_known
    assert learn(FAKES[-1], limit_gib=1000.0).is_known


def test_a_batch_at_the_edge_is_worth_a_probe_only_where_it_surely_runs():
    rows = [*FAKES, make_row("device", 64, 0.9), make_row("device", 512, 5.4)]
    plan = BASE.replace(batch_size=512)
    assert learn(*rows, limit_gib=10.6).find_edge(plan, {64, 512}) == 1024
    assert learn(*rows, limit_gib=10.544).find_edge(plan, {64, 512}) == 1024, (
        "10.545 are predicted, and may be a little less"
    )
    assert learn(*rows, limit_gib=8.0).find_edge(plan, {64, 512}) is None
    refused = make_row("end_to_end", 1024, None, status="out_of_memory")
    assert learn(*rows, refused, limit_gib=10.6).find_edge(plan, {64, 512}) is None


@pytest.mark.parametrize(
    ("levers", "on_cpu", "counts"),
    [
        ({"placement": "device"}, False, False),
        ({"placement": "stream"}, True, True),
        *(({"placement": name}, False, True) for name in ("stream", "ram", "memory_map", "block_shuffled")),
        *(({"placement": name}, True, False) for name in ("ram", "memory_map", "block_shuffled")),
        ({"num_workers": 4}, False, True),
        ({"num_workers": 4}, True, False),
    ],
)
def test_a_peak_is_held_against_the_batch_only_where_nothing_else_lies_in_that_memory(levers, on_cpu, counts):
    row = make_row("end_to_end", 64, 9.9, **levers)
    if on_cpu:
        row = dataclasses.replace(row, memory_reserved_peak_gib=None, memory_rss_peak_gib=9.9)
    assert fits(learn(*FAKES, row), 128) != counts


def test_doubts_are_those_of_the_plans_own_arm_and_none_where_memory_decides_nothing():
    bent = [make_row("memory", batch, max(2.0, 0.005 * batch)) for batch in (1, 16, 2048)]
    memory = learn(*bent, limit_gib=5.0)
    assert memory.find_doubtful_batch(BASE) == 512
    asked = [make_row("memory", batch, max(2.0, 0.005 * batch)) for batch in (512, 1024)]
    memory = learn(*bent, *asked, limit_gib=5.0)
    assert memory.find_doubtful_batch(BASE) is None
    assert learn(*bent, limit_gib=100.0).find_doubtful_batch(BASE) is None
    assert learn().find_doubtful_batch(BASE) is None


USERS = tuple(make_row("memory", batch, 1.0 + batch) for batch in (1, 8, 16, 2048))
HALF = tuple(make_row("memory", batch, 1.5 + 0.5 * batch, precision="bf16") for batch in (1, 2048))
"""Both take 2 GiB at one sample; what grows with the batch is half as much in bf16."""


def test_a_lever_that_halves_what_grows_halves_nothing_of_what_stays():
    """Taken at the nearest batch, which was 1, the ratio said that bf16 saves nothing: twice the batch was refused."""
    memory = learn(*USERS, *HALF, make_row("device", 4, 3.5, precision="bf16"), limit_gib=7.0)
    assert fits(memory, 8, precision="bf16")  # 5.5 GiB
    assert not fits(memory, 16, precision="bf16")  # 9.5
    assert not fits(memory, 8)  # 9


def test_a_batch_that_another_arms_estimate_refuses_is_estimated_itself():
    rows = (*USERS, *HALF, make_row("device", 4, 3.5, precision="bf16"))
    plan = BASE.replace(batch_size=4, precision="bf16")
    memory = learn(*rows, limit_gib=5.8)
    assert memory.find_doubtful_batch(plan) == 4, "the peak that is predicted from has no estimate of its own yet"
    own = [make_row("memory", batch, 1.5 + 0.5 * batch, precision="bf16") for batch in (4, 8)]
    memory = learn(*rows, own[0], limit_gib=5.8)
    assert not fits(memory, 8, precision="bf16")
    assert memory.find_doubtful_batch(plan) == 8
    assert learn(*rows, *own, limit_gib=5.8).find_doubtful_batch(plan) is None
