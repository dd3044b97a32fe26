"""The search for the fastest safe plan. Names load on first use; torch is imported in trial processes only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

if TYPE_CHECKING:
    from fulltilt.tuner.answer.hints import Hint
    from fulltilt.tuner.answer.result import EpochSeconds, SearchSummary, TuneResult, read_schema
    from fulltilt.tuner.picks.picks import Pick, Picks
    from fulltilt.tuner.picks.recommend import LearningRate
    from fulltilt.tuner.question.space import Space, build_space
    from fulltilt.tuner.search.progress import (
        PickMade,
        SearchEvent,
        SearchNoted,
        SearchStarted,
        TrialCut,
        TrialDone,
        TrialProgressed,
        TrialStarted,
    )
    from fulltilt.tuner.trials.target import ProcessTarget, Target
    from fulltilt.tuner.tuning import tune

_HOMES = {
    "answer.hints": ("Hint",),
    "search.progress": (
        "PickMade",
        "SearchEvent",
        "SearchNoted",
        "SearchStarted",
        "TrialCut",
        "TrialDone",
        "TrialProgressed",
        "TrialStarted",
    ),
    "picks.picks": ("Pick", "Picks"),
    "picks.recommend": ("LearningRate",),
    "answer.result": ("EpochSeconds", "SearchSummary", "TuneResult", "read_schema"),
    "question.space": ("Space", "build_space"),
    "trials.target": ("ProcessTarget", "Target"),
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
