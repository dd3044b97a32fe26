"""Rows of a search, made up, and searches whose trials are simulated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.config import config_from_values
from fulltilt.levers import default_plan
from fulltilt.records import Machine, Measurement, WorkloadSource
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.recommend import pick
from fulltilt.tuner.question.options import TuneOptions
from fulltilt.tuner.question.question import Question
from fulltilt.tuner.question.source import TuneTarget
from fulltilt.tuner.search.search import Search, run_finalists, run_strategy
from fulltilt.tuner.trials.rows import build_row
from fulltilt.tuner.trials.target import ProbeResult

USER = default_plan({"batch_size": 32})
GIB = 2**30
MACHINE = Machine(
    hostname_hash="0" * 12, system="Linux", is_wsl=False, cpu_model="cpu", n_cores_physical=2, n_cores_logical=2,
    n_cores_usable=2, memory_total_bytes=32 * GIB, memory_available_bytes=20 * GIB, memory_limit_bytes=None,
    shm_total_bytes=None, python="3.11", packages={}, devices=(),
)  # fmt: skip
OPTIONS = TuneOptions(
    batch_sizes=(16, 64), num_workers=None, n_steps=4, device="cpu", memory_limit_bytes=None, strategy="exhaustive",
    budget_s=None, free_batch=False, lr_rule="sqrt", deadline_s=1.0, deadline_asked_s=None, max_measure_s=1.0,
)  # fmt: skip


def make_question(options=OPTIONS, **values):
    config = config_from_values(values, base_dir=".")
    source = WorkloadSource(config=config.to_values(), base_dir=".")
    return Question(TuneTarget(config=config, source=source, name="x", code={}), options, MACHINE)


def search_to_the_end(session, space, options=OPTIONS, *, workload=None, has_finalists=True, **values):
    """Run the strategy and the finalists of a session whose target is simulated; what its stages share."""
    made = Search(
        question=make_question(options, **values), folder=SimpleNamespace(path="out"), target=None, space=space,
        probe=ProbeResult(facts=space.facts, workload=workload or {}), session=session, memory_gib=8.0,
    )  # fmt: skip
    run_strategy(made)
    if has_finalists:
        run_finalists(made)
    return made


def make_row(
    number, rate, *, plan=USER, memory=1.0, spread_pct=0.5, status="ok", reason=None, kind="end_to_end", **levers
):
    answer = Answer(samples_per_s=rate, memory_gib=memory, spread_pct=spread_pct, status=status, reason=reason)
    row = SimulatedTarget(lambda _: answer)(plan.replace(**levers), id=f"t{number}", why="")
    return dataclasses.replace(row, kind=kind, memory_rss_peak_gib=row.memory_rss_peak_gib if memory else None)


def build_bare_row(plan, kind, *, id="t1", why="", status="ok", **figures):
    """A row with these figures alone, where ``make_row`` fills in those of a usual run."""
    usual = {"phases_ms": None, "samples_per_s": 1.0, "samples_per_s_ci95": None, "block_samples_per_s": ()}
    measured = Measurement(**{**usual, "n_steps": 8, "n_warmup_steps": 2, **figures})
    reason = None if status == "ok" else "refused"
    return build_row(plan, id=id, why=why, kind=kind, status=status, reason=reason, measurement=measured, seconds=1.0)


def run_beside(number, *rates, comparison="abc", **options):
    """Runs of one plan side by side with others, numbered in their order."""
    rows = [make_row(number + i, rate, **{"kind": "repeat", **options}) for i, rate in enumerate(rates)]
    return [dataclasses.replace(row, comparison=comparison) for row in rows]


def pick_from(runs, *, limit_gib=None, user_plan=USER):
    rows, _ = recommend.merge_repeats(runs)
    return pick(rows, user_plan=user_plan, memory_limit_gib=limit_gib, runs=runs)
