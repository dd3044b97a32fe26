"""Which plans fit, from fake points, real peaks and refusals of several arms."""

from __future__ import annotations

import dataclasses
import math

import pytest
from tests.unit.tuner.tuner_cases import build_bare_row

from fulltilt.levers import default_plan
from fulltilt.tuner.search.model.arms import device_arm
from fulltilt.tuner.search.model.plan_memory import PlanMemory

BASE = default_plan({"batch_size": 1})
BATCHES = tuple(2**i for i in range(12))


def make_row(kind, batch, gib, status="ok", **levers):
    reserved_gib = None if kind == "memory" else gib
    peaks = {"memory_allocated_peak_gib": gib, "memory_reserved_peak_gib": reserved_gib}
    return build_bare_row(BASE.replace(batch_size=batch, **levers), kind, status=status, **peaks)


def make_fakes(fixed_gib, slope_gib, *batches, **levers):
    return [make_row("memory", batch, fixed_gib + slope_gib * batch, **levers) for batch in batches]


def learn(*rows, limit_gib=10.0):
    memory = PlanMemory(device_arm(BASE), BATCHES, limit_gib)
    for row in rows:
        memory.learn(row)
    return memory


def fits(memory, *batches, **levers):
    return [memory.fits(BASE.replace(batch_size=batch, **levers)) for batch in batches]


FAKES = make_fakes(0.2, 0.01, 1, 64, 2048)
REAL = (make_row("device", 64, 0.9), make_row("device", 512, 5.4))


def test_fake_points_alone_keep_a_margin_until_a_real_peak_takes_the_doubt_away():
    assert fits(learn(*FAKES), 256, 512, 1024) == [True, True, False]
    assert fits(learn(*FAKES, *REAL), 512, 1024) == [True, False]
    assert fits(learn(*FAKES, limit_gib=math.inf), 2048) == [True]
    memory = learn(*FAKES, *make_fakes(0.1, 0.005, 1, 2048, precision="bf16"), *REAL)
    assert fits(memory, 1024, 2048, precision="bf16") == [True, False], "an arm that only fake tensors saw"


def test_knowing_nothing_it_goes_up_by_doubling_and_never_to_what_ran_out_of_memory():
    assert fits(learn(), 2048) == [True]
    assert fits(learn(make_row("device", 64, None)), 128, 256) == [True, False]
    memory = learn(make_row("device", 64, 1.0), make_row("device", 128, None, status="out_of_memory"))
    assert fits(memory, 64, 128, 256) == [True, False, False]
    memory = learn(make_row("loader", 2048, None, status="out_of_memory"))
    assert fits(memory, 2048) == [True], "probes of the loader say nothing of memory"
    assert not any(memory.is_known for memory in (learn(), learn(FAKES[-1])))
    assert all(memory.is_known for memory in (learn(*FAKES), learn(FAKES[-1], limit_gib=1000.0)))


def test_a_batch_at_the_edge_is_worth_a_probe_only_where_it_surely_runs():
    def find_edge(*rows, limit_gib):
        return learn(*FAKES, *REAL, *rows, limit_gib=limit_gib).find_edge(BASE.replace(batch_size=512), {64, 512})

    assert find_edge(limit_gib=10.6) == 1024
    assert find_edge(limit_gib=10.544) == 1024, "10.545 are predicted, and may be a little less"
    assert find_edge(limit_gib=8.0) is None
    assert find_edge(make_row("end_to_end", 1024, None, status="out_of_memory"), limit_gib=10.6) is None


@pytest.mark.parametrize(
    ("levers", "counts_on_gpu", "counts_on_cpu"),
    [
        ({"placement": "device"}, False, False),
        ({"placement": "stream"}, True, True),
        *(({"placement": name}, True, False) for name in ("ram", "memory_map", "block_shuffled")),
        ({"num_workers": 4}, True, False),
    ],
)
def test_a_peak_counts_against_the_batch_only_where_nothing_else_lies_there(levers, counts_on_gpu, counts_on_cpu):
    row = make_row("end_to_end", 64, 9.9, **levers)
    assert fits(learn(*FAKES, row), 128) == [not counts_on_gpu]
    row = dataclasses.replace(row, memory_reserved_peak_gib=None, memory_rss_peak_gib=9.9)
    assert fits(learn(*FAKES, row), 128) == [not counts_on_cpu]


def test_doubts_are_those_of_the_plans_own_arm_and_none_where_memory_decides_nothing():
    bent = [make_row("memory", batch, max(2.0, 0.005 * batch)) for batch in (1, 16, 2048, 512, 1024)]
    assert learn(*bent[:3], limit_gib=5.0).find_doubtful_batch(BASE) == 512
    assert learn(*bent, limit_gib=5.0).find_doubtful_batch(BASE) is None
    assert learn(*bent[:3], limit_gib=100.0).find_doubtful_batch(BASE) is None
    assert learn().find_doubtful_batch(BASE) is None


# Both precisions take 2 GiB at one sample; what grows with the batch is half as much in bf16.
OF_BOTH = (
    *make_fakes(1.0, 1.0, 1, 8, 16, 2048),
    *make_fakes(1.5, 0.5, 1, 2048, precision="bf16"),
    make_row("device", 4, 3.5, precision="bf16"),
)


def test_a_lever_that_halves_what_grows_halves_nothing_of_what_stays():
    """Taken at the nearest batch, which was 1, the ratio said that bf16 saves nothing: twice the batch was refused."""
    memory = learn(*OF_BOTH, limit_gib=7.0)
    assert fits(memory, 8, 16, precision="bf16") == [True, False]  # 5.5 and 9.5 GiB
    assert fits(memory, 8) == [False]  # 9


def test_a_batch_that_another_arms_estimate_refuses_is_estimated_itself():
    plan, own = BASE.replace(batch_size=4, precision="bf16"), make_fakes(1.5, 0.5, 4, 8, precision="bf16")
    untold, told, memory = (learn(*OF_BOTH, *own[:n], limit_gib=5.8) for n in (0, 2, 1))
    assert untold.find_doubtful_batch(plan) == 4, "the peak that is predicted from has no estimate of its own yet"
    assert fits(memory, 8, precision="bf16") == [False]
    assert memory.find_doubtful_batch(plan) == 8
    assert told.find_doubtful_batch(plan) is None
