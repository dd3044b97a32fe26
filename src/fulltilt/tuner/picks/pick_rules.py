"""Say the rules of picks: which plans were compared, which tie, and what was passed over."""

import dataclasses
from collections.abc import Sequence

from fulltilt.records import Plan, Trial
from fulltilt.tuner.picks.picks import describe_changes
from fulltilt.tuner.picks.undecided import INDIFFERENCE_PCT

MAX_NAMED = 3  # rows that a rule names; of more it says how many


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TieWords:
    """Words for the ties of a pick, by what it was picked for.

    Attributes:
        best: What the ties cannot be told from.
        figure: Of what a plan may be slower, where it is not samples/s.
        of_these: Where only a part of the plans was asked about.
    """

    best: str
    figure: str = ""
    of_these: str = ""


BY_SPEED = TieWords(best="the fastest")
BY_SPEED_PER_GIB = TieWords(best="the best in samples/s per GiB", figure=" per GiB")
BY_SPEED_OF_THE_SMALL = TieWords(best="the fastest of these", of_these="of these, ")


def say_tie(tied: Sequence[Trial], question: TieWords = BY_SPEED) -> str:
    """Say how many plans tie, and by which rule one of them is taken."""
    if not tied:
        return ""
    best = question.best
    return (
        f"; tied with {'1 other' if len(tied) == 1 else f'{len(tied)} others'}, which these runs cannot tell from "
        f"{best}; of plans within {INDIFFERENCE_PCT:g} % of {best} the one with the smallest batch is taken, and of "
        "those the simplest"
    )


def say_kept_recipe(user_plan: Plan, chosen: Trial, passed_over: Trial) -> str:
    """Say why a tie did not end at the plan that the other picks would have taken: it changes the recipe."""
    if chosen is passed_over:
        return ""
    changed = "; ".join(describe_changes(user_plan, passed_over.plan)["recipe"])
    whose = "the settings as they were are" if chosen.plan == user_plan else "a plan that keeps the recipe is"
    return (
        f"; {passed_over.id} changes the recipe ({changed}) and is not proven faster: {whose} taken instead, by the "
        "same rule among those that keep it"
    )


def say_earlier(rows: Sequence[Trial], above: Sequence[Trial], question: TieWords = BY_SPEED) -> str:
    """Name the plans that were no finalists, and of which runs leave open that they are as fast."""
    if not rows:
        return ""
    plans = "1 plan that ran" if len(rows) == 1 else f"{len(rows)} plans that ran"
    said = (
        f"; {question.of_these}{plans} earlier, not beside it, did not come out clearly slower{question.figure}: named "
        "as ties too"
    )
    if not above:
        return said
    named = ", ".join(row.id for row in above) if len(above) <= MAX_NAMED else str(len(above))
    return f"{said}; of them {named} showed more, but plans measured side by side go first"


def count_compared(chosen: Trial, rows: Sequence[Trial], again: Sequence[Trial]) -> str:
    """Count the plans: ``2 plans measured side by side, of 7`` where the pick is one of these."""
    beside = filter_beside(rows, again)
    if chosen not in beside:
        return count_plans(rows)
    return f"{count_plans(beside)} measured side by side, of {len(rows)}"


def say_fastest(chosen: Trial, rows: Sequence[Trial], again: Sequence[Trial]) -> str:
    """Say of how many the pick is the fastest: ``the fastest of 2 plans measured side by side, of 7``."""
    if filter_beside(rows, again) == [chosen]:
        return f"the only one measured side by side, of {len(rows)}"
    return f"the fastest of {count_compared(chosen, rows, again)}"


def count_plans(rows: Sequence[object]) -> str:
    """Count in words: ``1 plan``, ``3 plans``."""
    return "1 plan" if len(rows) == 1 else f"{len(rows)} plans"


def name_mean(history: Sequence[Trial]) -> str:
    """Say "mean" where a plan ran more than once, so that its mean is compared."""
    return "mean " if len({run.plan for run in history}) < len(history) else ""


def filter_beside(rows: Sequence[Trial], again: Sequence[Trial]) -> list[Trial]:
    """Keep the rows of plans that ran side by side."""
    plans = {run.plan for run in again}
    return [row for row in rows if row.plan in plans]
