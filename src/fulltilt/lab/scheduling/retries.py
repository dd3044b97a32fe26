"""Decide what follows an end: failed, again after a while, or held; and which machine takes no more. Pure."""

import dataclasses

from fulltilt.lab.records import Node

MOST_LOST = 5  # ends in a row that are not the experiment's fault, before somebody has to look
MOST_BAD = 2  # such ends in a row on one machine, of different experiments
FIRST_DELAY_S, LONGEST_DELAY_S = 2.0, 300.0
NOT_ITS_FAULT = ("lost", "infra_refused")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sequel:
    """The arrow after an end, and what is stored with it."""

    arrow: str
    delay_s: float | None = None
    n_lost: int | None = None


def choose_sequel(outcome: str, *, wish: str | None, n_lost: int, draw: float) -> Sequel:
    """Choose what follows an attempt's end.

    Args:
        outcome: As in ``Experiment.outcome``.
        wish: What somebody wanted of it: cancel, pause.
        n_lost: Ends in a row before this one that were not the experiment's fault.
        draw: From 0 to 1: spreads those that ended together.
    """
    if outcome == "succeeded":
        return Sequel(arrow="finish", n_lost=0)
    if wish is not None:
        return Sequel(arrow={"cancel": "end", "pause": "park"}[wish])
    if outcome == "preempted":
        return Sequel(arrow="requeue", n_lost=0)
    if outcome not in NOT_ITS_FAULT:
        return Sequel(arrow="fail")
    if n_lost >= MOST_LOST:
        return Sequel(arrow="give_up", n_lost=n_lost + 1)
    delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**n_lost) * (0.5 + draw)
    return Sequel(arrow="back_off", delay_s=delay_s, n_lost=n_lost + 1)


def judge_node(node: Node, outcome: str, experiment: str) -> tuple[int, str | None]:
    """Return how many bad ends in a row a machine has after this one, and whose the last was."""
    if outcome not in NOT_ITS_FAULT:
        return 0, None
    return (node.n_bad if node.last_bad == experiment else node.n_bad + 1), experiment


def is_barred(node: Node) -> bool:
    return node.n_bad >= MOST_BAD
