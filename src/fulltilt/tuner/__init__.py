"""The search for the fastest safe plan. Names load on first use; torch is imported in trial processes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

if TYPE_CHECKING:
    from fulltilt.tuner.hints import Hint
    from fulltilt.tuner.picks import Pick, Picks
    from fulltilt.tuner.progress import (
        PickMade,
        SearchEvent,
        SearchNoted,
        SearchStarted,
        TrialCut,
        TrialDone,
        TrialProgressed,
        TrialStarted,
    )
    from fulltilt.tuner.recommend import LearningRate
    from fulltilt.tuner.result import EpochSeconds, SearchSummary, TuneResult, read_schema
    from fulltilt.tuner.space import Space, build_space
    from fulltilt.tuner.target import ProcessTarget, Target
    from fulltilt.tuner.tuning import tune

_HOMES = {
    "hints": ("Hint",),
    "progress": (
        "PickMade",
        "SearchEvent",
        "SearchNoted",
        "SearchStarted",
        "TrialCut",
        "TrialDone",
        "TrialProgressed",
        "TrialStarted",
    ),
    "picks": ("Pick", "Picks"),
    "recommend": ("LearningRate",),
    "result": ("EpochSeconds", "SearchSummary", "TuneResult", "read_schema"),
    "space": ("Space", "build_space"),
    "target": ("ProcessTarget", "Target"),
    "tuning": ("tune",),
}

__all__ = [
    "EpochSeconds",
    "Hint",
    "LearningRate",
    "Pick",
    "PickMade",
    "Picks",
    "ProcessTarget",
    "SearchEvent",
    "SearchNoted",
    "SearchStarted",
    "SearchSummary",
    "Space",
    "Target",
    "TrialCut",
    "TrialDone",
    "TrialProgressed",
    "TrialStarted",
    "TuneResult",
    "build_space",
    "read_schema",
    "tune",
]

__getattr__, __dir__ = load_on_use(__name__, _HOMES)
