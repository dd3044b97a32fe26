"""The models of time: exact where measured, sane between and beyond, and corrected by whole runs."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tuner.tuner_cases import build_bare_row

from fulltilt.levers import default_plan
from fulltilt.records import PhasesMs
from fulltilt.tuner.search.model.arms import ArmTimes, Curve, LoaderTime, Point, device_arm, feed_arm
from fulltilt.tuner.search.model.step_time import StepTime

PLAN = default_plan({"batch_size": 64})
FP32, BF16 = device_arm(PLAN), device_arm(PLAN.replace(precision="bf16"))
LAST = device_arm(PLAN.replace(channels_last=True))
BOTH = device_arm(PLAN.replace(precision="bf16", channels_last=True))
FEED = feed_arm(PLAN)
POINTS = st.dictionaries(st.integers(1, 4096), st.floats(1e-5, 10.0), min_size=1, max_size=6)


@given(POINTS, st.integers(1, 16384))
def test_a_curve_goes_through_its_points_and_stays_positive(points, batch):
    curve = Curve(points)
    assert all(curve(b) == pytest.approx(s) for b, s in points.items())
    assert curve(batch) > 0


def test_a_curve_goes_on_as_a_line_and_is_level_where_it_falls():
    curve = Curve({10: 1.0, 20: 1.5, 40: 2.5})
    assert (curve(80), curve(5)) == (pytest.approx(4.5), pytest.approx(0.75))
    assert 1.5 < curve(30) < 2.5
    assert Curve({10: 2.0, 20: 1.0})(40) == pytest.approx(1.0)


def test_gains_of_levers_multiply_only_where_they_were_not_measured_together():
    points = [
        *(Point(arm=FP32, batch=b, seconds=0.01 * b) for b in (16, 64)),
        Point(arm=BF16, batch=64, seconds=0.32),
        Point(arm=LAST, batch=64, seconds=0.48),
    ]
    times = ArmTimes(points)
    assert times(BF16, 64) == pytest.approx(0.32)
    assert times(BOTH, 64) == pytest.approx(0.64 * 0.5 * 0.75)
    assert times(BOTH, 16) == pytest.approx(0.16 * 0.5 * 0.75)
    assert ArmTimes([*points, Point(arm=BOTH, batch=64, seconds=0.9)])(BOTH, 64) == pytest.approx(0.9)


def build_loader(seconds):
    """Of (workers, batch) → seconds, on 8 cores."""
    points = collections.defaultdict(list)
    for (n_workers, batch), took_s in seconds.items():
        points[n_workers].append(Point(arm=FEED, batch=batch, seconds=took_s))
    return LoaderTime(points, n_cores=8)


def test_workers_divide_loading_up_to_the_cores_and_small_batches_cost_what_the_nearest_number_of_them_paid():
    """A small batch that loads slowly once counted as if more workers were slower."""
    loader = build_loader({(0, 64): 1.0, (4, 64): 0.25})
    assert loader(FEED, 4, 64) == pytest.approx(0.25)
    assert 0.25 < loader(FEED, 2, 64) < 1.0
    assert loader(FEED, 8, 64) == pytest.approx(0.125)
    assert loader(FEED, 16, 64) == pytest.approx(0.125), "past the usable cores they take turns"
    loader = build_loader({(0, 64): 1.0, (4, 64): 0.25, (8, 64): 0.125, (8, 1): 0.1})
    assert loader(FEED, 8, 1) == pytest.approx(0.1)
    assert loader(FEED, 4, 1) > 0.1
    assert loader(FEED, 4, 64) == pytest.approx(0.25), "held against each other at the batch where both ran"


def make_row(kind, rate, *, optimizer_ms=None, receive_ms=None, **levers):
    plan = PLAN.replace(**levers)
    step_ms = 1e3 * plan.effective_batch_size / rate
    phases = None
    if optimizer_ms is not None:
        compute_ms = {"forward": (step_ms - optimizer_ms) / 3, "backward": (step_ms - optimizer_ms) * 2 / 3}
        phases = PhasesMs(data_wait=0.0, h2d=0.0, other=0.0, optimizer=optimizer_ms, step=step_ms, **compute_ms)
    rates = {"samples_per_s": rate, "samples_per_s_ci95": (rate, rate), "block_samples_per_s": (rate,)}
    return build_bare_row(plan, kind, phases_ms=phases, receive_ms=receive_ms, **rates)


def build(*rows, on_cpu=False, noise=None):
    device, loader, whole = ([row for row in rows if row.kind == kind] for kind in ("device", "loader", "end_to_end"))
    return StepTime(device=device, loader=loader, whole=whole, n_cores=8, on_cpu=on_cpu, noise=noise)


def load(rate, **levers):
    return make_row("loader", rate, **{"num_workers": 8, **levers})


DEVICE = make_row("device", 1000.0)


def test_without_workers_loading_and_computing_take_turns_and_with_them_they_overlap():
    model = build(DEVICE, load(500.0, num_workers=0), load(4000.0))
    assert model.predict_step_s(PLAN) == pytest.approx(0.064 + 0.128)
    assert 0.064 <= model.predict_step_s(PLAN.replace(num_workers=8)) < 1.05 * 0.064
    rows, plan = (DEVICE, load(10.0, num_workers=0), load(80.0)), PLAN.replace(num_workers=8)
    on_cpu, on_gpu = (build(*rows, on_cpu=on_cpu).predict_step_s(plan) for on_cpu in (True, False))
    assert on_cpu > on_gpu, "loading takes cores from the step"
    model = build(make_row("device", 640.0, optimizer_ms=20.0))
    assert model.predict_step_s(PLAN) == pytest.approx(0.1)
    assert model.predict_step_s(PLAN.replace(accumulate=4)) == pytest.approx(4 * 0.08 + 0.02), "one update a window"


def test_on_a_cpu_workers_take_cores_from_the_threads_of_a_step():
    rows = [
        *(make_row("device", rate, threads=n) for n, rate in ((None, 1000.0), (2, 900.0))),
        *(load(rate, num_workers=n) for n, rate in ((0, 2000.0), (4, 8000.0), (8, 8000.0))),
    ]
    model = build(*rows, on_cpu=True)

    def slow_by(threads, num_workers):
        with_workers = PLAN.replace(threads=threads, num_workers=num_workers)
        alone, beside = np.exp(model.predict_log_rate([with_workers.replace(num_workers=0), with_workers])[0])
        return alone / beside

    assert slow_by(2, 4) < 0.75 < 1.0 < slow_by(None, 4), "two of eight cores leave room for four workers, eight none"
    assert slow_by(2, 8) > 1.25 * slow_by(2, 4)
    # Of eight threads that compute all the time and a worker's work: more than eight cores have.
    assert model.predict_step_s(PLAN.replace(num_workers=8)) > 0.064 + 64 / 2000 / 8
    many = build(make_row("device", 1000.0, threads=16), *rows[2:], on_cpu=True)
    assert many.predict_step_s(PLAN.replace(threads=16, num_workers=8)) < 1.3 * 0.064, "sixteen have eight cores, too"
    met = make_row("end_to_end", math.exp(model.predict_log_rate([PLAN.replace(num_workers=8)])[0][0]), num_workers=8)
    (before,), (after,) = (build(*rows, *whole, on_cpu=True).predict_log_rate([PLAN])[0] for whole in ((), (met,)))
    assert after == pytest.approx(before), "a run as slow as predicted teaches nothing"


def test_receiving_a_batch_costs_something_of_any_batch_and_something_of_each_sample():
    rows = make_row("device", 1e6, batch_size=2048), load(7e4, batch_size=32, receive_ms=0.40)
    model, slowed = (build(*rows, load(3e5, batch_size=2048, receive_ms=receive_ms)) for receive_ms in (0.42, 20.0))
    assert model.predict_step_s(PLAN.replace(num_workers=8, batch_size=2048)) < 1.01 * 2048 / 3e5
    assert slowed.predict_step_s(PLAN.replace(num_workers=8, batch_size=4096)) > 0.039
    # Through 0.1 ms at 16 and 2 ms at 64 went a line that began at −0.53 ms: at 8 it was as dear as +0.22 ms.
    loader = load(1e9, batch_size=16, receive_ms=0.1), load(1e9, batch_size=64, receive_ms=2.0)
    model = build(make_row("device", 1e9, batch_size=8), *loader)
    seconds = [model.predict_step_s(PLAN.replace(num_workers=8, batch_size=size)) for size in (1, 8, 16, 64)]
    assert seconds == sorted(seconds)
    assert seconds[0] == pytest.approx(2e-3 / 64, rel=0.01)
    assert seconds[3] == pytest.approx(2e-3, rel=0.01)
    # Beside a pinning thread less is left to receive, as pinned batches tell.
    loader = load(1e6, receive_ms=20.0), load(1e6, receive_ms=0.01, pin_memory=True)
    model = build(make_row("device", 1e6), *loader)
    assert model.predict_step_s(PLAN.replace(num_workers=8)) >= 0.02
    assert model.predict_step_s(PLAN.replace(num_workers=8, pin_memory=True)) < 0.001


def test_whole_runs_correct_the_prediction_near_them_most():
    parts = DEVICE, make_row("device", 1200.0, batch_size=1024), load(1e6, num_workers=0)
    plans = [PLAN, PLAN.replace(batch_size=4096, num_workers=8, precision="bf16")]
    (near_before, far_before), _ = build(*parts).predict_log_rate(plans)
    after, sds = build(*parts, make_row("end_to_end", 700.0)).predict_log_rate(plans)
    assert math.exp(after[0]) == pytest.approx(700.0, rel=0.03)
    assert abs(after[0] - near_before) > abs(after[1] - far_before) > 0
    assert sds[0] < sds[1]


def test_where_loading_bounds_the_step_one_precision_teaches_of_the_other():
    def learn_shift(load_rate):
        parts = make_row("device", 4000.0), make_row("device", 8000.0, precision="bf16"), load(load_rate)
        whole = make_row("end_to_end", 0.8 * min(load_rate, 4000.0), num_workers=8)
        other = PLAN.replace(num_workers=8, precision="bf16")
        (before,), _ = build(*parts).predict_log_rate([other])
        (after,), (sd,) = build(*parts, whole).predict_log_rate([other])
        return before - after, sd

    bound, sd_bound = learn_shift(400.0)
    free, sd_free = learn_shift(40_000.0)
    assert bound > free > 0
    assert sd_bound < sd_free
    # of plans that should be equal fewer workers are preferred
    model = build(DEVICE, load(1e7, num_workers=0), load(1e7))
    means, _ = model.predict_log_rate([PLAN.replace(num_workers=2), PLAN.replace(num_workers=8)])
    assert means[0] > means[1]
    assert np.isfinite(means).all()


def test_a_noisy_run_moves_the_prediction_less_and_leaves_it_less_sure():
    rows = DEVICE, make_row("end_to_end", 1300.0)
    quiet, noisy = (build(*rows, noise=noise).predict_log_rate([PLAN]) for noise in (None, 0.2))
    assert math.exp(quiet[0][0]) == pytest.approx(1300.0, rel=0.01)
    assert 1000.0 < math.exp(noisy[0][0]) < 1200.0
    assert noisy[1][0] > 5 * quiet[1][0]
