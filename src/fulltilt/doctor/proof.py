"""What removing a site saved, from blocks of steps that ran with it and without it in turn."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from fulltilt.attach.inside.blocks import N_TIMED, PRESENT, PRESENT_AGAIN, REMOVED
from fulltilt.doctor.observation import Observation
from fulltilt.stats import Decision, decide

MIN_ROUNDS = 4
MIN_A_A_ROUNDS = 2
A_A_CONFIDENCE = (
    0.99  # what may be called a difference of the site from itself: at 95 % it would silence one proof in 20
)
ACT_ABOVE_PCT = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One site against its absence, and against itself.

    Attributes:
        gain_pct: Share of the step's time that is saved without the site, with its 95 % interval.
        a_a_pct: The same for the site against itself: what the machine calls a gain where there is none.
        is_quiet: Whether the site agrees with itself; if not, no gain can be told.
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
        """Whether the site is worth acting on: all of the interval lies above ACT_ABOVE_PCT."""
        return self.is_quiet and self.gain_ci95_pct[0] > ACT_ABOVE_PCT


def compute_proof(observation: Observation) -> Proof | None:
    """None where too few rounds were run to their end."""
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
    """Mean step times of the whole rounds that compare PRESENT with ``other``, each of shape (rounds, 2)."""
    counted = (observation.get("is_timed") == 1) & (observation.get("flags") == 0)
    blocks: dict[int, dict[int, list[float]]] = {}
    for number in np.unique(observation.get("block")[counted]):
        steps = counted & (observation.get("block") == number)
        if steps.sum() == N_TIMED:  # a block that an epoch's end broke off was run again
            round_, arm = int(observation.get("round")[steps][0]), int(observation.get("arm")[steps][0])
            blocks.setdefault(round_, {}).setdefault(arm, []).append(float(observation.get("wall")[steps].mean()))
    whole = [arms for arms in blocks.values() if len(arms.get(PRESENT, ())) == 2 == len(arms.get(other, ()))]
    return np.array([arms[PRESENT] for arms in whole]), np.array([arms[other] for arms in whole])
