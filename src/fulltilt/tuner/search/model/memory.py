"""Predict peak memory over the batch size from a few real probes and many fake ones, with bounds.

The peak is the largest of the moments of a step, and each moment holds something fixed and something per sample:
peak(b) = max of aᵢ + sᵢ·b. With aᵢ at least what is always there (parameters, optimizer state), two bounds follow that
need no fit:

- **convex**: a chord between two measured points is above the curve; a line through two of them is below it outside.
- **no faster than in proportion**: (peak − persistent)/b never grows, so the ray from the persistent memory through a
  measured point is above the curve beyond it.

The distance between them is what a probe decides. Fake points (``measure.fake_memory``) know where the curve bends, and
miss a constant (context, libraries) and some scratch: real = offset + ratio · fake, learnt from the real points from a
prior on. Only real points teach that have a fake point of their own, or lie where neighbouring fake points are on one
line: a peak that is flat before it rises lies far below the chord. A prediction takes the end of what the fake curve
can be that makes it larger.

Source: Bayesian linear regression with known noise (Bishop 2006, section 3.3).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np

SETTLED_PCT = 1.0  # a slope that repeats, or a prediction that comes true, this closely
EXACT_PCT = 0.1  # the range left to a fake curve that is as good as known
TELLING_SHARE = 0.25  # of the peak that must grow with the batch before its slope is believed
NOISE_SHARE = 0.005  # of the largest measured peak: how much equal runs differ
MARGIN_PCT = 4.0  # kept back for what was not run: scratch, segments (measure.fake_memory)
_Z = 2.0

Basis = Literal["measured", "chord", "fake_corrected", "extrapolated"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """A predicted peak in GiB, which lies in ``low`` to ``high`` if the curve has the stated form."""

    gib: float
    low: float
    high: float
    basis: Basis  # measured here; a chord between measured batches; by the corrected fake curve; beyond both


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """Coefficients of real = offset_gib + ratio · fake with standard deviations, before any probe by default.

    A fake peak misses scratch, from nothing to a third of the peak and mostly below 2 % (by case in
    ``benchmarks/results/memory_prediction-cpu.json``), and context or libraries, for which 0 to 0.9 GiB is assumed.
    The ratio was set with those cases in view: they are no independent test of it.
    """

    ratio: float = 1.02
    offset_gib: float = 0.3
    ratio_sd: float = 0.1
    offset_sd_gib: float = 0.3


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory of one arm, a choice of all levers that change memory, over the batch size."""

    real: Mapping[int, float] = dataclasses.field(default_factory=dict)  # batch size → measured peak, GiB
    fake: Mapping[int, float] = dataclasses.field(default_factory=dict)  # → peak on fake tensors; one alone is no curve
    refused: Collection[int] = ()  # batch sizes that ran out of memory
    persistent_gib: float = 0.0  # of parameters and optimizer state, always there; 0 is always true
    prior: Correction = Correction()  # what another arm taught (``transfer``)
    inferred: Collection[int] = ()  # batches whose fake point was scaled from another arm's: no teachers either

    def __post_init__(self) -> None:
        for name in ("real", "fake"):
            object.__setattr__(self, name, dict(sorted(getattr(self, name).items())))

    def predict_gib(self, batch: int) -> MemoryEstimate:
        """Predict the peak at ``batch``.

        Raises:
            ValueError: nothing is known: no real point and fewer than two fake ones.
        """
        if batch in self.real:
            return MemoryEstimate(gib=self.real[batch], low=self.real[batch], high=self.real[batch], basis="measured")
        low, high = self._bound(batch)
        if self._has_fake:
            return self._predict_by_fake(batch, low, high)
        first, last = min(self.real), max(self.real)
        if first < batch < last:
            return MemoryEstimate(gib=high, low=low, high=high, basis="chord")
        if batch < first or len(self.real) == 1:
            return MemoryEstimate(gib=high, low=low, high=high, basis="extrapolated")
        if self.is_settled:  # then the slope is known about as closely as it repeated
            high = min(high, low + 2 * SETTLED_PCT / 100 * (low - self.real[last]))
        return MemoryEstimate(gib=low, low=low, high=high, basis="extrapolated")

    def largest_safe_batch(self, candidates: Sequence[int], limit_gib: float) -> int | None:
        """Return the largest candidate measured below the limit, or predicted to with ``MARGIN_PCT`` to spare."""
        if not self.real and not self._has_fake:
            return None
        return max((c for c in self._drop_refused(candidates) if self._is_safe(c, limit_gib)), default=None)

    def find_doubtful_batch(self, candidates: Sequence[int], limit_gib: float) -> int | None:
        """Find the batch whose own fake point would tell whether doubtful candidates fit.

        First that of the real point they are predicted from, then the middle one of them. None: no candidate is in
        doubt, or no fake point would change that.
        """
        if not self._has_fake:
            return None
        left = [c for c in sorted(self._drop_refused(candidates)) if c not in self.real]
        unsafe = [c for c in left if not self._is_safe(c, limit_gib)]
        doubtful = [c for c in unsafe if self.predict_gib(c).low <= limit_gib]
        if not doubtful:
            return None
        anchor = max((b for b in self.real if b < doubtful[0]), default=None)
        is_estimated = anchor in self.fake and anchor not in self.inferred
        if anchor is not None and not is_estimated and (not self._teachers or self._is_vague(anchor)):
            return anchor
        vague = [c for c in doubtful if c in self.inferred or self._is_vague(c)]
        return vague[(len(vague) - 1) // 2] if vague else None

    @property
    def is_settled(self) -> bool:
        """Whether the slope between real points repeated, where plainly much grows with the batch."""
        if len(self.real) < 3:
            return False
        last, slopes = max(self.real), _find_slopes(self.real)
        if slopes[-1] * last <= TELLING_SHARE * self.real[last]:
            return False
        return abs(slopes[-2] / slopes[-1] - 1) <= SETTLED_PCT / 100

    def compute_correction(self) -> Correction:
        """Learn the correction from real points with fake points at the same batch; without any return the prior."""
        if not self._has_fake or not self._teachers:
            return self.prior
        batches = np.array(self._teachers, dtype=float)
        peaks = np.array([self.real[b] for b in self._teachers])
        fakes = np.array([self._bound_fake(b)[1] for b in self._teachers])
        # Small batches say little about scratch at large ones, so they weigh less.
        noise = NOISE_SHARE * peaks.max() * np.sqrt(batches.max() / batches)
        rows = np.stack([np.ones_like(fakes), fakes], axis=1) / noise[:, None]
        # No prior on the offset: real points fix it, and a wrong guess of it would bend the ratio.
        prior_precision = np.diag([0.0, self.prior.ratio_sd**-2])
        covariance = np.linalg.inv(prior_precision + rows.T @ rows)
        offset, ratio = covariance @ (prior_precision @ np.array([0.0, self.prior.ratio]) + rows.T @ (peaks / noise))
        offset_sd, ratio_sd = np.sqrt(np.maximum(np.diag(covariance), 0.0))
        return Correction(
            ratio=float(ratio), offset_gib=float(offset), ratio_sd=float(ratio_sd), offset_sd_gib=float(offset_sd)
        )

    def transfer(self, fake: Mapping[int, float]) -> MemoryCurve:
        """Build the curve of another arm with fake points only, with what this one taught as its prior.

        Arms differ in their kernels, so the prior is wider than what this arm would say of itself.
        """
        learnt = self.compute_correction()
        prior = dataclasses.replace(
            learnt,
            ratio_sd=max(learnt.ratio_sd, Correction().ratio_sd),
            offset_sd_gib=math.hypot(learnt.offset_sd_gib, Correction().offset_sd_gib / 10),
        )
        return MemoryCurve(fake=fake, prior=prior)

    @property
    def _has_fake(self) -> bool:
        return len(self.fake) > 1

    @property
    def _teachers(self) -> list[int]:
        """Batches with a real and a fake point, and real ones where the fake curve can only be straight."""
        if self.inferred:
            return [b for b in self.real if b in self.fake and b not in self.inferred]
        return [b for b in self.real if min(self.fake) <= b <= max(self.fake) and not self._is_vague(b, EXACT_PCT)]

    def _is_vague(self, batch: int, tolerance_pct: float = SETTLED_PCT) -> bool:
        """Whether a fake point at ``batch`` could come out elsewhere than on the chord."""
        low, high = self._bound_fake(batch)
        return high - low > tolerance_pct / 100 * high

    def _bound_fake(self, batch: int) -> tuple[float, float]:
        """Bound the fake curve at ``batch``: below the chord, above its neighbours' lines (it is convex).

        Beyond its points it is taken to go on straight; never below the smallest line through 0.
        """
        if batch in self.fake:
            return self.fake[batch], self.fake[batch]
        first, last, slopes = min(self.fake), max(self.fake), _find_slopes(self.fake)
        if batch > last:
            end = self.fake[last] + slopes[-1] * (batch - last)
            return end, end
        if batch < first:
            end = max(self.fake[first] * batch / first, self.fake[first] + slopes[0] * (batch - first))
            return end, end
        low, high = _bound_by_lines(self.fake, batch)
        return min(max(low, max(p for b, p in self.fake.items() if b < batch)), high), high

    def _predict_by_fake(self, batch: int, low: float, high: float) -> MemoryEstimate:
        """Follow the corrected fake curve from the nearest real point on; between two through both."""
        correction, (fake_low, fake_high) = self.compute_correction(), self._bound_fake(batch)
        below = max((b for b in self.real if b < batch), default=None)
        above = min((b for b in self.real if b > batch), default=None)
        basis: Basis = "fake_corrected" if batch <= max(self.fake) else "extrapolated"
        if below is not None and above is not None:
            first, last = self._bound_fake(below)[1], self._bound_fake(above)[1]
            share = (fake_high - first) / (last - first) if last > first else (batch - below) / (above - below)
            gib = self.real[below] + share * (self.real[above] - self.real[below])
            return MemoryEstimate(gib=min(max(gib, low), high), low=low, high=high, basis="fake_corrected")
        anchor = below if below is not None else above
        if anchor is None:
            gib = correction.offset_gib + correction.ratio * fake_high
            sds = [math.hypot(correction.offset_sd_gib, correction.ratio_sd * fake) for fake in (fake_low, fake_high)]
            least = correction.offset_gib + correction.ratio * fake_low - _Z * sds[0]
            return MemoryEstimate(gib=gib, low=min(gib, max(low, least)), high=gib + _Z * sds[1], basis=basis)
        anchor_low, anchor_high = self._bound_fake(anchor)
        steps = (fake_low - anchor_high, fake_high - anchor_low)
        sds = [math.hypot(correction.ratio_sd * step, NOISE_SHARE * self.real[anchor]) for step in steps]
        least, gib = (min(max(self.real[anchor] + correction.ratio * step, low), high) for step in steps)
        least, most = max(low, least - _Z * sds[0]), min(high, gib + _Z * sds[1])
        return MemoryEstimate(gib=gib, low=least, high=most, basis=basis)

    def _bound(self, batch: int) -> tuple[float, float]:
        """Compute the two bounds of the head of this file, from the real points alone."""
        below, above = [b for b in self.real if b < batch], [b for b in self.real if b > batch]
        low, high = _bound_by_lines(self.real, batch)
        low = max(low, self.persistent_gib)
        if below:
            low = max(low, self.real[below[-1]])
            grown = (self.real[below[-1]] - self.persistent_gib) * batch / below[-1]
            high = min(high, self.persistent_gib + max(grown, 0.0))
        if above:
            high = min(high, self.real[above[0]])
        return min(low, high), high  # measured peaks scatter: they may cross by a little

    def _is_safe(self, batch: int, limit_gib: float) -> bool:
        estimate = self.predict_gib(batch)
        return estimate.high * (1.0 if estimate.basis == "measured" else 1 + MARGIN_PCT / 100) <= limit_gib

    def _drop_refused(self, candidates: Sequence[int]) -> list[int]:
        too_large = min(self.refused, default=math.inf)
        return [c for c in candidates if c < too_large]


def _find_slopes(points: Mapping[int, float]) -> list[float]:
    """Return GiB per sample between neighbours; ``points`` are sorted."""
    batches = list(points)
    return [(points[b] - points[a]) / (b - a) for a, b in itertools.pairwise(batches)]


def _bound_by_lines(points: Mapping[int, float], batch: int) -> tuple[float, float]:
    """Bound a convex curve: above the lines through two neighbours, below the chord."""
    below, above = [b for b in points if b < batch], [b for b in points if b > batch]
    pairs = [(pair[0], pair[1]) for pair in (below[-2:], above[:2]) if len(pair) == 2]
    low = max((_read_line(points, a, b, batch) for a, b in pairs), default=-math.inf)
    return low, _read_line(points, below[-1], above[0], batch) if below and above else math.inf


def _read_line(points: Mapping[int, float], a: int, b: int, at: int) -> float:
    return points[a] + (points[b] - points[a]) / (b - a) * (at - a)
