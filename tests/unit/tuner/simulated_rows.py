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
    return dataclasses.replace(row, kind=kind, memory_rss_peak_gib=row.memory_rss_peak_gib if memory else None)


def run_beside(number, *rates, comparison="abc", **options):
    """Runs of one plan side by side with others, numbered in their order."""
    rows = [make_row(number + i, rate, **{"kind": "repeat", **options}) for i, rate in enumerate(rates)]
    return [dataclasses.replace(row, comparison=comparison) for row in rows]


def pick_from(runs, *, limit_gib=None, user_plan=USER):
    rows, _ = recommend.merge_repeats(runs)
    return pick(rows, user_plan=user_plan, memory_limit_gib=limit_gib, runs=runs)
