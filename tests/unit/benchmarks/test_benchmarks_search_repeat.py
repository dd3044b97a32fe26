"""What counts as the same end of a search: the usual plan, or a tie with it that the search declares itself."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.plan_quality import Workload
from benchmarks.search_repeat import find_usual, judge_results

from fulltilt.levers import default_plan
from fulltilt.records import Trial

A, B, C = PLANS = [default_plan({"batch_size": size}) for size in (16, 32, 64)]
WORKLOAD = Workload(name="made up", target="none", settings={}, axes=("batch_size",))


def build_result(recommended, ties=(), rates=(3.0, 2.0, 1.0)):
    trials = tuple(
        Trial(id=f"t{i}", plan=plan, status="ok", samples_per_s=rate)
        for i, (plan, rate) in enumerate(zip(PLANS, rates, strict=True))
    )
    tied_with = tuple(f"t{PLANS.index(plan)}" for plan in ties)
    pick = SimpleNamespace(trial=trials[PLANS.index(recommended)], tied_with=tied_with, runs_samples_per_s=())
    search = SimpleNamespace(n_end_to_end=3, seconds=1.0, n_groups=12)
    return SimpleNamespace(trials=trials, repeats=(), picks=SimpleNamespace(recommended=pick), search=search)


def test_a_declared_tie_with_the_usual_plan_is_agreement_and_silence_is_not():
    results = [build_result(A), build_result(A), build_result(B, ties=[C, A]), build_result(C, ties=[B])]
    arms, exceptions = judge_results(WORKLOAD, results)
    agrees = {arm.arm: arm.samples for arm in arms if arm.metric == "agrees"}
    assert exceptions == [3]
    assert agrees["recommended, or a tie of it"] == (1.0, 1.0, 1.0, 0.0)
    assert agrees["recommended"] == (1.0, 1.0, 0.0, 0.0)
    assert find_usual([B, A, A, B]) == B, "of equals the first"


def test_the_fastest_row_is_held_against_its_own_usual_plan():
    results = [build_result(A), build_result(A, rates=(1.0, 5.0, 2.0)), build_result(A, rates=(1.0, 4.0, 2.0))]
    arms, _ = judge_results(WORKLOAD, results)
    assert next(arm for arm in arms if arm.arm == "fastest row").samples == (0.0, 1.0, 1.0)
