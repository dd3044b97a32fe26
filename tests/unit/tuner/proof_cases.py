"""Proofs on simulated machines: what they ask for, and what they come to."""

import itertools
import math

from tests.simulated_target import Answer, SimulatedTarget
from tests.unit.tuner.tuner_cases import USER, build_space, make_row, make_turns

from fulltilt.levers import Facts
from fulltilt.stats.alternation import LOOKS
from fulltilt.tuner.answer.conclude import select_rows
from fulltilt.tuner.answer.picks import pick
from fulltilt.tuner.picks.finalists import select_finalists
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.proof import N_RACE, Proof
from fulltilt.tuner.search.search import run_proof
from fulltilt.tuner.search.session import Ask, Session

FACTS = Facts(device_type="cpu", n_cores_usable=4)
SPACE = build_space(facts=FACTS)
FAILED = Answer(status="error", reason="no luck")


def change(**levers):
    """The user's own plan with these levers: threads, channels_last, fused_optimizer alter numerics, others do not."""
    return USER.replace(**levers)


def multiply(**factors):
    """A machine on which each lever that differs from the user's has its share in the speed."""
    return lambda plan: 1000.0 * math.prod(by for name, by in factors.items() if plan[name] != USER[name])


MANY = change(num_workers=2, retain_freed_memory=True, worker_threads=2)


def speed_up(plan):
    """Two workers gain 20 %, the other changes of ``MANY`` nothing."""
    return 1000.0 * {0: 1.0, 1: 1.05, 2: 1.2}[plan["num_workers"]]


def feed(plans, rate, *, seconds=1.0, limit_s=1000.0, n_groups=math.inf, space=SPACE, find_memory_gib=lambda plan: 1.0):
    """Hand a proof of these plans what it asks for: ``rate`` of (plan, number of the group), None where it fails.

    After ``n_groups`` the budget ends → the proof and the groups that it asked for.
    """
    numbers = itertools.count(1)
    rows = [make_row(next(numbers), rate(plan, 0), plan=plan) for plan in (*plans, USER)]
    proof = Proof(space, rows, select_finalists(rows, limit_gib=None), limit_s=limit_s)
    groups, steps, answer, ran = [], proof.run(), None, {row.plan for row in rows}
    try:
        while True:
            wish = steps.send(answer)
            if isinstance(wish, Ask):
                assert wish.plan not in ran, "a plan runs as a whole once"
                ran.add(wish.plan)
                alone = rate(wish.plan, 0)
                answer = make_row(
                    next(numbers), alone, plan=wish.plan, status="ok" if alone else "error",
                    memory=find_memory_gib(wish.plan),
                )  # fmt: skip
                continue
            if len(groups) == n_groups:
                steps.close()
                return proof, groups
            groups.append(wish.plans)
            assert len(groups) <= N_RACE + 3 * LOOKS[-1], "it ends"
            rates = {plan: rate(plan, len(groups)) for plan in wish.plans}
            failed = [plan for plan in rates if rates[plan] is None][:1]
            answer = [
                make_turns(next(numbers), len(groups), rates[plan], plan=plan, seconds=seconds,
                           status="error" if failed else "ok")
                for plan in failed or rates
            ]  # fmt: skip
    except StopIteration:
        return proof, groups


def search(plans, rate, *, in_turns=None, journal=None, seconds=1.0, on_call=lambda plan: None, clock=None, **options):
    """Run the user's own plan and these on a simulated machine, then prove the best.

    → session, proof, picks and target.
    """
    target_options = {name: options.pop(name) for name in ("noise_pct", "drift_pct", "seed") if name in options}

    def build_answer(of):
        def answer(plan):
            if clock is not None:
                clock.now_s += seconds
            found = of(plan)
            return found if isinstance(found, Answer) else Answer(samples_per_s=found, seconds=seconds)

        return answer

    alone, together = build_answer(rate), build_answer(in_turns or rate)
    target = SimulatedTarget(alone, in_turns=together, on_call=on_call, **target_options)
    given = options if clock is None else {"clock": clock, **options}
    session = Session(target, journal or Journal(), **given)
    session.run((Ask(plan=plan, why="") for plan in (USER, *plans)), reserve_after_n=math.inf)
    proof = run_proof(session, SPACE)
    table = select_rows(session.rows, session.turns, USER)
    return session, proof, pick(table, proof, user_plan=USER, memory_limit_gib=None), target
