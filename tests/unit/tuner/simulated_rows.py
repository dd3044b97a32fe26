"""Rows of a search, made up: what the tests of picks and ties pick from."""

from __future__ import annotations

import dataclasses

from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import default_plan
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.recommend import pick

USER = default_plan({"batch_size": 32})


def make_row(number, rate, *, memory=1.0, spread_pct=0.5, status="ok", kind="end_to_end", **levers):
    plan = USER.replace(**levers)
    answer = Answer(samples_per_s=rate, memory_gib=memory, spread_pct=spread_pct, status=status)
    row = SimulatedTarget(lambda _: answer)(plan, id=f"t{number}", why="")
    return dataclasses.replace(row, kind=kind)


def run_beside(number, rate, **levers):
    return dataclasses.replace(make_row(number, rate, kind="repeat", **levers), comparison="abc")


def pick_from(runs):
    rows, _ = recommend.merge_repeats(runs)
    return pick(rows, user_plan=USER, memory_limit_gib=None, runs=runs)
