"""Compute what removing a line saves, from alternating blocks of steps with it and without it."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from fulltilt.attach.inside.blocks import N_TIMED, PRESENT, PRESENT_AGAIN, REMOVED
from fulltilt.doctor.observation import Observation
from fulltilt.stats import Decision, decide

MIN_ROUNDS = 4
MIN_A_A_ROUNDS = 2
A_A_CONFIDENCE = 0.99  # confidence of the A/A test: at 95 % it would reject one good proof in 20
ACT_ABOVE_PCT = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The comparison of a line with its absence, and with itself (A/A).

    Attributes:
        gain_pct: Share of the step's time saved without the line, with its 95 % interval.
        a_a_pct: The same for the line against itself, where the true gain is 0.
        is_quiet: Whether the A/A interval holds 0; if not, the machine was too noisy to judge.
    """

    gain_pct: float
    gain_ci95_pct: tuple[float, float]
    a_a_pct: float
    a_a_ci95_pct: tuple[float, float]
    is_quiet: bool
    n_rounds: int
    n_a_a_rounds: int

    @property
    def is_act(self) -> bool:
        """Whether the whole interval of the gain lies above ACT_ABOVE_PCT."""
        return self.is_quiet and self.gain_ci95_pct[0] > ACT_ABOVE_PCT


def compute_proof(observation: Observation) -> Proof | None:
    """Compute the proof; None: too few rounds were completed."""
    present, removed = _collect_rounds(observation, REMOVED)
    own, again = _collect_rounds(observation, PRESENT_AGAIN)
    if len(present) < MIN_ROUNDS or len(own) < MIN_A_A_ROUNDS:
        return None
    gain, a_a = decide(present, removed), decide(own, again)
    low, high = decide(own, again, confidence=A_A_CONFIDENCE).ci_pct
    return Proof(
        gain_pct=-gain.effect_pct,
        gain_ci95_pct=_negate(gain),
        a_a_pct=-a_a.effect_pct,
        a_a_ci95_pct=_negate(a_a),
        is_quiet=low <= 0 <= high,
        n_rounds=len(present),
        n_a_a_rounds=len(own),
    )


def _negate(decision: Decision) -> tuple[float, float]:
    low, high = decision.ci_pct
    return -high, -low


def _collect_rounds(observation: Observation, other: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean step times of complete rounds that compare PRESENT with ``other``, shape (rounds, 2) each."""
    counted = (observation.get("is_timed") == 1) & (observation.get("flags") == 0)
    blocks: dict[int, dict[int, list[float]]] = {}
    for number in np.unique(observation.get("block")[counted]):
        steps = counted & (observation.get("block") == number)
        if steps.sum() == N_TIMED:  # a block cut short by an epoch's end was run again
            round_, arm = int(observation.get("round")[steps][0]), int(observation.get("arm")[steps][0])
            blocks.setdefault(round_, {}).setdefault(arm, []).append(float(observation.get("wall")[steps].mean()))
    whole = [arms for arms in blocks.values() if len(arms.get(PRESENT, ())) == 2 == len(arms.get(other, ()))]
    return np.array([arms[PRESENT] for arms in whole]), np.array([arms[other] for arms in whole])
