"""Search for the settings (a plan) that train fastest and fit in memory, by running them.

Names load on first use; torch is imported in trial processes only.
"""

from typing import TYPE_CHECKING

from fulltilt._lazy import load_on_use

# ruff: noqa: F401

if TYPE_CHECKING:
    from fulltilt.tuner.answer.hints import Hint
    from fulltilt.tuner.answer.picks import Pick, Picks
    from fulltilt.tuner.answer.result import EpochSeconds, SearchSummary, TuneResult, read_schema
    from fulltilt.tuner.batch_size import find_batch_size
    from fulltilt.tuner.picks.changes import LearningRate
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
        TurnsDone,
    )
    from fulltilt.tuner.trials.target import ProcessTarget, Target
    from fulltilt.tuner.tuning import tune

__getattr__, __dir__ = load_on_use(__name__, __file__)
