"""The memory curve on synthetic peaks of the stated form: largest of affine moments, each above what persists."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulltilt.tuner.search.model.memory import MARGIN_PCT, Correction, MemoryCurve

POWERS = tuple(2**k for k in range(11))
MARGIN = 1 + MARGIN_PCT / 100


@dataclasses.dataclass(frozen=True)
class Peak:
    """max of (fixed + slope · batch) over moments, GiB."""

    moments: tuple[tuple[float, float], ...]

    def __call__(self, batch: int) -> float:
        return max(fixed + slope * batch for fixed, slope in self.moments)

    @property
    def persistent(self) -> float:
        return min(fixed for fixed, _ in self.moments)

    def at(self, *batches: int) -> dict[int, float]:
        return {b: self(b) for b in batches}


moments = st.tuples(st.floats(0.05, 8.0), st.floats(1e-4, 0.2))
peaks = st.lists(moments, min_size=1, max_size=5).map(lambda found: Peak(tuple(found)))


def draw_batches(min_size, max_size, batches=POWERS):
    return st.lists(st.sampled_from(batches), min_size=min_size, max_size=max_size, unique=True)


# Optimizer step at small batches (large fixed, no growth), backward pass from 10 on.
BENT = Peak(((4.0, 0.001), (2.0, 0.2)))


@given(peak=peaks, measured=draw_batches(1, 5), batch=st.integers(1, 1024))
@settings(max_examples=300, deadline=None)
def test_bounds_from_real_points_hold_the_true_peak(peak, measured, batch):
    curve = MemoryCurve(real=peak.at(*measured), persistent_gib=peak.persistent)
    estimate = curve.predict_gib(batch)
    assert estimate.low <= estimate.gib <= estimate.high
    if batch > max(measured) and curve.is_settled:
        return  # the one place where a slope is believed to go on: a kink may still lie beyond
    assert estimate.low <= peak(batch) * (1 + 1e-9)
    assert estimate.high >= peak(batch) * (1 - 1e-9)


@given(peak=peaks, measured=draw_batches(2, 5))
@settings(max_examples=200, deadline=None)
def test_between_measured_points_the_estimate_is_the_chord_and_never_too_low(peak, measured):
    curve = MemoryCurve(real=peak.at(*measured))
    for batch in set(range(min(measured) + 1, max(measured))) - set(measured):
        estimate = curve.predict_gib(batch)
        assert estimate.basis == "chord"
        assert estimate.gib >= peak(batch) * (1 - 1e-9)


@given(peaks, st.floats(0.99, 1.05), st.floats(0.0, 0.8), draw_batches(1, 4, POWERS[:8]))
@settings(max_examples=300, deadline=None)
def test_a_corrected_fake_curve_holds_the_true_peak_beyond_the_probes(peak, ratio, offset, measured):
    real = {b: offset + ratio * peak(b) for b in measured}
    estimate = MemoryCurve(real=real, fake=peak.at(*POWERS)).predict_gib(1024)
    true = offset + ratio * peak(1024)
    assert estimate.low * 0.999 <= true <= estimate.high * 1.001
    assert abs(estimate.gib / true - 1) <= 0.045


def test_a_bend_that_probes_have_not_reached_is_seen_by_fake_points_and_not_by_a_line():
    real, true = BENT.at(2, 4), BENT(512)
    by_fake = MemoryCurve(real=real, fake=BENT.at(*POWERS)).predict_gib(512)
    by_line = MemoryCurve(real=real).predict_gib(512)
    assert (by_fake.basis, by_line.basis) == ("fake_corrected", "extrapolated")
    assert by_fake.gib == pytest.approx(true, rel=0.03)
    assert by_line.gib < 0.1 * true
    assert by_line.high > true
    assert not MemoryCurve(real=BENT.at(1, 2, 4, 8)).is_settled, "its slope repeats, and hardly anything grows"
    assert MemoryCurve(real=BENT.at(16, 32, 64)).is_settled
    beyond = MemoryCurve(real=BENT.at(32), fake=BENT.at(16, 32, 64)).predict_gib(256)
    assert beyond.basis == "extrapolated", "of the fake points"
    assert beyond.gib == pytest.approx(BENT(256), rel=0.03)


def test_two_real_points_teach_ratio_and_offset():
    fake = BENT.at(*POWERS)
    curve = MemoryCurve(real={b: 0.5 + 1.06 * fake[b] for b in (16, 64, 256)}, fake=fake)
    found = curve.compute_correction()
    assert found.ratio == pytest.approx(1.06, abs=0.005)
    assert found.ratio_sd < Correction().ratio_sd / 2
    assert curve.predict_gib(1024).gib == pytest.approx(0.5 + 1.06 * fake[1024], rel=0.005)


@given(peaks, st.floats(0.5, 60.0), st.floats(0.0, 0.6), draw_batches(0, 4))
@settings(max_examples=300, deadline=None)
def test_what_is_called_safe_fits_whatever_was_measured(peak, limit, offset, measured):
    fitting = {batch: offset + peak(batch) for batch in measured if offset + peak(batch) <= limit}
    refused = [batch for batch in measured if batch not in fitting]
    safe = MemoryCurve(real=fitting, fake=peak.at(*POWERS), refused=refused).largest_safe_batch(POWERS, limit)
    assert safe is None or offset + peak(safe) <= limit
    alone = MemoryCurve(real=fitting, refused=refused).largest_safe_batch(POWERS, limit)
    assert (alone is None) == (not fitting)


def test_measured_fits_without_a_margin_and_predicted_needs_one_and_room_for_the_upper_end():
    curve = MemoryCurve(real=BENT.at(16, 32, 64))
    assert curve.largest_safe_batch([16, 32, 64], BENT(64)) == 64
    between = BENT(32) + (BENT(64) - BENT(32)) / 2
    assert curve.largest_safe_batch([16, 32, 48], between) == 32
    assert curve.largest_safe_batch([16, 32, 48], between * MARGIN) == 48
    assert curve.largest_safe_batch([16, 32], 1.0) is None
    curve = MemoryCurve(real=BENT.at(32), fake=BENT.at(*POWERS))
    estimate = curve.predict_gib(256)
    assert estimate.low < estimate.gib < estimate.high
    assert curve.largest_safe_batch([32, 256], estimate.gib * 1.01 * MARGIN) == 32
    assert curve.largest_safe_batch([32, 256], estimate.high * 1.01 * MARGIN) == 256
    refused = dataclasses.replace(curve, refused=(64,))
    assert refused.largest_safe_batch(POWERS, 1000.0) == 32, "never what ran out of memory, nor above it"


def test_another_arm_inherits_offset_and_ratio():
    checkpointed = Peak(((4.0, 0.001), (3.0, 0.05)))
    plain = MemoryCurve(real={b: 0.9 + 1.04 * BENT(b) for b in (16, 64)}, fake=BENT.at(*POWERS))
    inherited = plain.transfer(checkpointed.at(*POWERS))
    untaught = MemoryCurve(fake=checkpointed.at(*POWERS))
    true = 0.9 + 1.04 * checkpointed(256)
    estimate = inherited.predict_gib(256)
    assert abs(estimate.gib - true) < min(0.02 * true, abs(untaught.predict_gib(256).gib - true))
    assert estimate.low <= true <= estimate.high


FLAT = Peak(((2.0, 0.0), (0.0, 0.00125)))  # rises from 1,600 on
FAR = (1, 16, 512, 8192)
TO_FAR = [2**k for k in range(14)]


def read_real(*batches):
    return {batch: 0.3 + FLAT(batch) for batch in batches}


def test_a_peak_that_is_flat_before_it_rises_teaches_no_small_ratio():
    """Bug: real points below the chord of far fake points looked like a small ratio, and 8,192 ran out of memory."""
    curve = MemoryCurve(real=read_real(512, 1024, 2048), fake=FLAT.at(*FAR))
    assert curve.compute_correction().ratio == pytest.approx(Correction().ratio, abs=0.01)
    estimate = curve.predict_gib(8192)
    assert estimate.low <= read_real(8192)[8192] <= estimate.high
    assert curve.largest_safe_batch([2048, 8192], 8.0) == 2048
    foreign = MemoryCurve(real={512: 9.9, 8192: 20.0}, fake=FLAT.at(*FAR), inferred={512, 8192})
    assert foreign.compute_correction() == Correction(), "nor do fake points of another arm teach anything"


def test_a_chord_between_far_fake_points_is_asked_about_before_it_refuses_what_fits():
    curve = MemoryCurve(real=read_real(512), fake=FLAT.at(*FAR))
    assert curve.largest_safe_batch(TO_FAR, 4.0) == 1024
    asked = []
    while (batch := curve.find_doubtful_batch(TO_FAR, 4.0)) is not None:
        asked.append(batch)
        curve = dataclasses.replace(curve, fake={**curve.fake, batch: FLAT(batch)})
    assert asked == [2048, 4096]
    assert curve.largest_safe_batch(TO_FAR, 4.0) == 2048
    off = MemoryCurve(real=read_real(1024), fake=FLAT.at(*FAR))
    assert off.find_doubtful_batch([1024, 2048, 4096], 4.0) == 1024, "what is predicted from gets a point of its own"


def test_nothing_is_in_doubt_where_fake_points_lie_on_one_line_or_all_is_safe():
    line = Peak(((0.5, 0.01),))
    assert MemoryCurve(fake=line.at(*FAR)).find_doubtful_batch(TO_FAR, 20.0) is None
    assert MemoryCurve(fake=FLAT.at(*FAR)).find_doubtful_batch(TO_FAR, 100.0) is None
    assert MemoryCurve(real=FLAT.at(512)).find_doubtful_batch(TO_FAR, 4.0) is None
    with pytest.raises(ValueError, match="empty"):  # one fake point is no curve
        MemoryCurve(fake={8: 1.0}).predict_gib(16)
