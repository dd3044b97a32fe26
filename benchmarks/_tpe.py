"""Optuna's TPE as a search strategy; a peer, so optuna is imported when the strategy runs.

Settings are the sampler's own defaults. Ordered axes are integers by rank, the others categorical, as Optuna's
documentation of distributions has it. A plan that ran out of memory is told as pruned: the sampler then ranks it below
every finished trial, while one told as failed would be left out of its model and asked again.
Source: https://optuna.readthedocs.io/en/stable/tutorial/20_recipes/009_ask_and_tell.html and
https://optuna.readthedocs.io/en/stable/reference/samplers/generated/optuna.samplers.TPESampler.html
"""

from __future__ import annotations

import importlib.util
from typing import Any

from fulltilt.records import Plan
from fulltilt.tuner.question.space import COUPLED, Space, canonicalize
from fulltilt.tuner.search.session import Ask, Strategy


def is_available() -> bool:
    return importlib.util.find_spec("optuna") is not None


def run_tpe(space: Space, *, n_trials: int, seed: int) -> Strategy:
    """Ask the sampler ``n_trials`` times; a plan it asks twice is answered from its first run."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    distributions = {
        name: optuna.distributions.IntDistribution(0, len(values) - 1)
        if _is_ordered(values)
        else optuna.distributions.CategoricalDistribution(values)
        for name, values in space.axes.items()
    }
    for number in range(n_trials):
        asked = study.ask(distributions)
        trial = yield Ask(plan=_build_plan(space, asked.params), why=f"TPE, trial {number + 1} of {n_trials}")
        if trial.status == "ok":
            study.tell(asked, trial.samples_per_s)
        else:
            study.tell(asked, state=optuna.trial.TrialState.PRUNED)


def _is_ordered(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _build_plan(space: Space, params: dict[str, Any]) -> Plan:
    values = {name: space.axes[name][v] if _is_ordered(space.axes[name]) else v for name, v in params.items()}
    batch_size = values.pop(COUPLED)
    return canonicalize(space.with_value(space.base.replace(**values), COUPLED, batch_size), space.facts)
