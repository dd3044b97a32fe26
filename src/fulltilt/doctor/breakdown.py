"""Divides the time of a step among the kinds of work in it."""

from __future__ import annotations

from fulltilt.attach.inside.spans import KINDS
from fulltilt.doctor.observation import Observation


def compute_breakdown_pct(observation: Observation) -> dict[str, float]:
    """Shares of the plain steps' wall time; what nothing claims is ``unknown``, so they add up to 100."""
    plain = observation.plain
    wall_ns = float(plain.get("wall").sum())
    if not wall_ns:
        return {}
    shares = {kind: 100 * float(plain.get(kind).sum()) / wall_ns for kind in KINDS}
    return {**shares, "unknown": 100 - sum(shares.values())}


def compute_step_ms(observation: Observation) -> float:
    """The mean wall time of a plain step."""
    return float(observation.plain.get("wall").mean()) / 1e6


def compute_overhead_us(observation: Observation) -> float | None:
    """What the observer itself took of a step: its timed calls at their calibrated cost, and its bookkeeping."""
    if not observation.n_steps:
        return None
    return (observation.n_spans * observation.span_ns + observation.own_ns) / observation.n_steps / 1000
