"""Rows of a search, made up, and searches whose trials are simulated."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.config import config_from_values
from fulltilt.levers import Facts, default_plan
from fulltilt.records import IN_TURNS, Machine, Measurement, WorkloadSource
from fulltilt.stats import Turns
from fulltilt.tuner.answer.picks import pick
from fulltilt.tuner.picks.finalists import select_finalists
from fulltilt.tuner.question.options import TuneOptions
from fulltilt.tuner.question.question import Question
from fulltilt.tuner.question.source import TuneTarget
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.proof import Proof
from fulltilt.tuner.search.search import Search, run_proof, run_strategy
from fulltilt.tuner.trials.rows import build_row, build_turns_row
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


def make_search(session, space, options=OPTIONS, *, workload=None, **values):
    """What the stages of a search share whose target is simulated."""
    session.user_plan = space.user_plan
    return Search(
        question=make_question(options, **values), folder=SimpleNamespace(path="out"), target=session.target,
        space=space, probe=ProbeResult(facts=space.facts, workload=workload or {}), session=session, memory_gib=8.0,
    )  # fmt: skip


def search_to_the_end(session, space, options=OPTIONS, **given):
    """Run the strategy and the proof of a session whose target is simulated; what its stages share, and the proof."""
    made = make_search(session, space, options, **given)
    run_strategy(made)
    return made, run_proof(session, space)


def build_space(user=USER, *, memory_gib=None, facts=None, **axes):
    facts = facts or Facts(device_type="cpu", n_cores_usable=4)
    return Space(axes=axes, base=user, user_plan=user, facts=facts, memory_gib=memory_gib)


def make_row(
    number, rate, *, plan=USER, memory=1.0, spread_pct=0.5, status="ok", reason=None, kind="end_to_end", **levers
):
    answer = Answer(samples_per_s=rate, memory_gib=memory, spread_pct=spread_pct, status=status, reason=reason)
    row = SimulatedTarget(lambda _: answer)(plan.replace(**levers), id=f"t{number}", why="")
    return dataclasses.replace(row, kind=kind, memory_rss_peak_gib=row.memory_rss_peak_gib if memory else None)


def make_turns(number, group, rate, *, plan=USER, status="ok", stalled_pct=0.0, seconds=1.0, **levers):
    """A row of a plan in turns."""
    plan, id = plan.replace(**levers), f"t{number}"
    if status != "ok":
        row = make_row(number, None, plan=plan, status=status, kind=IN_TURNS)
    else:
        turns = Turns(samples_per_s=rate, stalled_pct=stalled_pct)
        row = build_turns_row(plan, turns, id=id, why="", seconds=seconds)
    return dataclasses.replace(row, group=group)


def build_bare_row(plan, kind, *, id="t1", why="", status="ok", **figures):
    """A row with these figures alone, where ``make_row`` fills in those of a usual run."""
    usual = {"phases_ms": None, "samples_per_s": 1.0, "samples_per_s_ci95": None, "block_samples_per_s": ()}
    measured = Measurement(**{**usual, "n_steps": 8, "n_warmup_steps": 2, **figures})
    reason = None if status == "ok" else "refused"
    return build_row(plan, id=id, why=why, kind=kind, status=status, reason=reason, measurement=measured, seconds=1.0)


def prove(rows, rates, *, space=None, n_groups=4):
    """A proof that was fed groups by hand: of these plans, at these rates."""
    space = space or build_space()
    proof = Proof(space, rows, select_finalists(rows, limit_gib=space.memory_gib), limit_s=30.0)
    for _ in range(n_groups if rates else 0):
        proof.evidence.add({plan: Turns(samples_per_s=rate, stalled_pct=0.0) for plan, rate in rates.items()})
    return proof


def pick_from(rows, rates=None, *, limit_gib=None, user_plan=USER, best=None, n_groups=4):
    """Picks from single runs and the rates of their plans in turns, of which ``best`` came out ahead."""
    space = build_space(user_plan, memory_gib=limit_gib and 0.8 * limit_gib)
    proof = prove(rows, rates or {}, space=space, n_groups=n_groups)
    proof.best = best or proof.best
    return pick(rows, proof, user_plan=user_plan, memory_limit_gib=limit_gib)
