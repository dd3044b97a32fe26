"""Divide the time of a step among the kinds of work in it."""

from __future__ import annotations

from fulltilt.attach.inside.spans import KINDS
from fulltilt.doctor.observation import Observation


def compute_breakdown_pct(observation: Observation) -> dict[str, float]:
    """Compute the share of each kind of work in plain steps; ``unknown`` is the rest, so all add up to 100."""
    plain = observation.plain
    wall_ns = float(plain.get("wall").sum())
    if not wall_ns:
        return {}
    shares = {kind: 100 * float(plain.get(kind).sum()) / wall_ns for kind in KINDS}
    return {**shares, "unknown": 100 - sum(shares.values())}


def compute_step_ms(observation: Observation) -> float:
    """Return the mean wall time of a plain step."""
    return float(observation.plain.get("wall").mean()) / 1e6


def compute_overhead_us(observation: Observation) -> float | None:
    """Estimate what observing adds to a step: timed calls at their calibrated cost, and bookkeeping."""
    if not observation.n_steps:
        return None
    return (observation.n_spans * observation.span_ns + observation.own_ns) / observation.n_steps / 1000
