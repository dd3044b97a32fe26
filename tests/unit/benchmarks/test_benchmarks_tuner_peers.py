"""``tuner_peers``: what a tool left is measured as the plan that it is, and what it said is kept apart from that."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from benchmarks import _tuner_tools, tuner_peers
from benchmarks._peers_finders import FINDERS
from benchmarks._peers_job import Job
from benchmarks._runner import Context, silence_peers
from benchmarks._tuner_cases import CASES
from benchmarks._tuner_tools import (
    TOOLS,
    Left,
    Question,
    ask_tool,
    is_available,
    read_autotune,
    read_finder,
    translate_autotune,
)
from benchmarks.tuner_peers import (
    N_GROUPS,
    OURS,
    OURS_FREE,
    OWN,
    build_plans,
    describe_findings,
    describe_tools,
    judge_tools,
    read_tune,
    take_turns,
)

from fulltilt.config import plan_of
from fulltilt.levers import default_plan
from fulltilt.records import Trial
from fulltilt.stats import Comparison
from fulltilt.stats.alternation import LOOKS

PLAN = default_plan({"batch_size": 32})
PEER, FINDER = "pytorch-autotune", "lightning, power"
LEFT = {
    OURS: Left(settings={"threads": 1}, seconds=50.0, said_speedup=1.3, said_ci=(1.2, 1.4)),
    OURS_FREE: Left(settings={"threads": 1, "batch_size": 64}, seconds=60.0, said_speedup=1.5, said_ci=(1.4, 1.6)),
    PEER: Left(settings={"compile": True}, seconds=200.0, said_speedup=2.0, told=("its winner is […]",)),
    FINDER: Left(settings={"batch_size": 2048}, seconds=9.0),
    "accelerate, default start": Left(settings=None, seconds=1.0, failure="RuntimeError: no"),
}
PLANS = {OWN: PLAN, **build_plans(PLAN, LEFT)}
RATES = {OWN: 100.0, OURS: 130.0, OURS_FREE: 150.0, PEER: 120.0, FINDER: 200.0}


def measure_planted(rates=None, failing=()):
    """Answer as a target does, with a drift that hits all plans of a group alike."""
    by_plan = {PLANS[name]: rate for name, rate in (rates or RATES).items()}
    calls = []

    def measure(plans):
        calls.append(set(plans.values()))
        failed = [(id, plan) for id, plan in plans.items() if plan in [PLANS[name] for name in failing]]
        if failed:
            return [Trial(id=id, plan=plan, status="timeout", reason="late (log: /x)") for id, plan in failed[:1]]
        drift = 1 + len(calls) / 10
        return [
            Trial(id=id, plan=plan, status="ok", samples_per_s=drift * by_plan[plan], stalled_pct=1.0)
            for id, plan in plans.items()
        ]

    return measure, calls


@pytest.fixture
def measured():
    return take_turns(PLANS, measure_planted()[0], n_groups=6)


# The turns.


def test_plans_that_are_the_same_are_measured_once_and_drift_cancels_in_the_ratio(measured):
    measure, calls = measure_planted()
    twice = take_turns({**PLANS, "again": PLAN}, measure, n_groups=6)
    assert calls == [set(PLANS.values())] * 6
    assert twice.compute_ratios(PLANS[PEER], PLAN) == pytest.approx([1.2] * 6)
    found = measured.compare(PLAN, PLANS[PEER])
    assert (found.verdict, found.n_groups) == ("faster", 6)
    assert found.gain_pct == pytest.approx(20)
    assert measured.stalled_pct == 1.0


def test_a_plan_that_fails_has_no_figure_and_the_others_begin_anew():
    measure, calls = measure_planted(failing=[FINDER])
    measured = take_turns(PLANS, measure, n_groups=4)
    assert measured.failures == {PLANS[FINDER]: "timeout: late"}
    assert PLANS[FINDER] not in measured.rates
    assert [len(rates) for rates in measured.rates.values()] == [4] * 4
    assert len(calls) == 5
    said = "\n".join(describe_findings("c", PLANS, LEFT, measured))
    assert "cannot be trained (timeout: late)" in said
    assert not [t for t in judge_tools("c", PLANS, measured) if FINDER in t.name]


def test_without_the_users_own_settings_there_is_nothing_to_compare_with():
    with pytest.raises(RuntimeError, match="the user's own settings ended with timeout: late"):
        take_turns(PLANS, measure_planted(failing=[OWN])[0], n_groups=4)


def test_the_groups_end_where_the_product_may_look():
    assert N_GROUPS in LOOKS


# What is said of the tools.


def test_each_tool_has_its_seconds_its_batch_and_its_speed_beside_the_users_own(measured):
    arms = {(arm.arm, arm.metric): arm for arm in describe_tools("c", PLANS, LEFT, measured)}
    assert arms[PEER, "ratio_to_own"].samples == pytest.approx([1.2] * 6)
    assert {name: arms[name, "said_interval"].median for name in LEFT} == {
        OURS: 1, OURS_FREE: 1, PEER: 0, FINDER: 0, "accelerate, default start": 0,
    }  # fmt: skip
    assert arms[PEER, "said_speedup"].median == 2.0
    assert (FINDER, "said_speedup") not in arms
    assert (arms[FINDER, "effective_batch_size"].median, arms[OWN, "effective_batch_size"].median) == (2048, 32)
    assert {metric for name, metric in arms if name.startswith("accelerate")} == {"seconds", "said_interval"}
    assert arms[OURS, "seconds"].median == 50.0


def test_a_finder_is_held_against_the_search_that_may_change_the_batch_too(measured):
    targets = {target.name: target for target in judge_tools("c", PLANS, measured)}
    assert {name: (round(t.measured, 3), t.met) for name, t in targets.items()} == {
        f"c: {OURS}, over {OWN}": (1.3, True),
        f"c: {OURS_FREE}, over {OWN}": (1.5, True),
        f"c: {OURS}, over {PEER}": (1.083, True),
        f"c: {OURS_FREE}, over {FINDER}": (0.75, False),
    }
    same = {**PLANS, PEER: PLANS[OURS]}
    (race,) = [t for t in judge_tools("c", same, measured) if PEER in t.name]
    assert (race.measured, race.note) == (1.0, "the same settings")


def test_the_words_tell_choice_gain_recipe_and_what_was_said(measured):
    said = list(describe_findings("c", PLANS, LEFT, measured))
    ours, _, peer, finder, failed = said[1:]
    assert ours.startswith("c: fulltilt, 50 s: threads=1; faster, +30.0 % (98 % interval +30.0 to +30.0)")
    assert "it said 1.3 times, 1.2 to 1.4" in ours
    assert "compile=True" in peer
    assert "it said 2 times, no interval; its winner is […]" in peer
    assert "another recipe: effective batch 2048" in finder
    assert "it said no gain" in finder
    assert failed == "c: accelerate, default start ended after 1 s without an answer: RuntimeError: no"


@pytest.mark.parametrize("is_proven", [True, False])
def test_our_own_search_leaves_what_is_proven_and_says_what_was_ahead(is_proven):
    ahead = SimpleNamespace(
        trial=SimpleNamespace(plan=PLANS[OURS]),
        gain=Comparison(verdict="undecided", gain_pct=5.0, ci_pct=(-1.0, 11.0), n_groups=40),
    )
    kept = SimpleNamespace(trial=SimpleNamespace(plan=PLAN), gain=None)
    picks = SimpleNamespace(recommended=ahead if is_proven else kept, unproven=None if is_proven else ahead, best=ahead)
    left = read_tune(SimpleNamespace(picks=picks, user_plan=PLAN, search=SimpleNamespace(seconds=9.0)))
    assert left.settings == ({"threads": 1} if is_proven else {})
    assert left.said_ci == pytest.approx((0.99, 1.11))
    assert left.told == (() if is_proven else ("of what was ahead and is not proven: threads=1",))


# The tools.


@pytest.mark.parametrize(
    ("chosen", "device", "settings", "said"),
    [
        (("tf32", "off", True, False), "cpu", {"precision": "fp32", "channels_last": True}, ["measured as fp32"]),
        (("fp32_default", "off", False, False), "cuda:0", {"precision": "fp32"}, []),
        (("amp_bf16", "default", False, True), "cuda:0",
         {"precision": "bf16", "compile": True, "fused_optimizer": True, "cudnn_benchmark": True}, []),
        (("amp_fp16", "max-autotune", False, False), "cuda:0",
         {"precision": "fp16", "compile": "max-autotune", "cudnn_benchmark": True}, ["without its CUDA graphs"]),
        (("tf32", "reduce-overhead", False, False), "cpu", {"precision": "fp32", "compile": True},
         ["measured as fp32", "measured as compile=True, which it is on a CPU"]),
        (("tf32", "reduce-overhead", False, False), "cuda:0",
         {"precision": "tf32", "compile": "reduce-overhead", "cudnn_benchmark": True}, []),
        (("fp32_default", "max-autotune", False, False), "cpu", {"precision": "fp32", "compile": "max-autotune"}, []),
    ],
)  # fmt: skip
def test_what_autotune_chose_becomes_levers_and_what_differs_is_told(chosen, device, settings, said):
    names = ("precision", "compile", "channels_last", "fused_opt")
    found, told = translate_autotune(dict(zip(names, chosen, strict=True)), device)
    unmoved = {"precision": "fp32", "compile": False, "channels_last": False, "fused_optimizer": False}
    assert found == {**unmoved, **settings}
    assert len(told) == len(said)
    assert all(words in line for words, line in zip(said, told, strict=True))
    PLAN.replace(**found)


def test_what_autotune_skipped_and_what_failed_is_told():
    config = SimpleNamespace(
        label="w", to_dict=lambda: {"precision": "tf32", "compile": "off", "channels_last": False, "fused_opt": False}
    )
    trials = [
        SimpleNamespace(config=SimpleNamespace(label=label), status=status, note=note)
        for label, status, note in (("a", "ok", ""), ("b", "skipped", ""), ("c", "disqualified", "no memory"))
    ]
    report = SimpleNamespace(trials=trials, winner=SimpleNamespace(speedup=1.5))
    job = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    left = read_autotune(SimpleNamespace(config=config, report=report), job)
    assert (left.said_speedup, left.said_ci) == (1.5, None)
    assert {"not tried for want of time: b", "failed: c (no memory)"} <= set(left.told)


@pytest.mark.parametrize(
    ("found", "batch_size", "told"), [(9, 9, ()), (16, 10, ("it recommends 16, the data has 10: one batch an epoch",))]
)
def test_a_batch_larger_than_the_data_is_all_of_it(found, batch_size, told):
    left = read_finder(found, SimpleNamespace(dataset=range(10)))
    assert (left.settings, left.told) == ({"batch_size": batch_size}, told)


def test_a_tool_that_dies_or_takes_too_long_is_a_failure():
    question = Question(tool="no such tool", case=next(iter(CASES)), device="cpu")
    died = ask_tool(question)
    assert died.settings is None
    assert "no such tool" in str(died.failure)
    assert "no answer after 0.05 s" in str(ask_tool(question, deadline_s=0.05).failure)


def test_what_a_tool_does_not_survive_is_its_answer_and_the_clock_is_read(monkeypatch):
    def fail(job, question):
        raise RuntimeError("no batch fits\nand more")

    monkeypatch.setitem(TOOLS, "made up", make_up(fail))
    question = Question(tool="made up", case="digits, small transformer", device="cpu")
    left = _tuner_tools.main(question)
    assert (left.settings, left.failure) == (None, "RuntimeError: no batch fits")
    monkeypatch.setitem(TOOLS, "made up", make_up(lambda job, question: 96))
    left = _tuner_tools.main(question)
    assert left.settings == {"batch_size": 96}
    assert left.seconds > 0


def make_up(call):
    return dataclasses.replace(TOOLS[FINDER], package="json", loads="json", call=call)


def test_tools_that_are_not_installed_are_told_and_each_names_its_settings(monkeypatch):
    assert all("https://" in tool.settings for tool in TOOLS.values())
    assert {name: tool.frees_batch for name, tool in TOOLS.items()} == {
        name: name in FINDERS for name in (PEER, FINDER, "lightning, binsearch", "accelerate, default start")
    }
    assert not is_available(dataclasses.replace(TOOLS[PEER], package="no_such_package"))
    monkeypatch.setattr(tuner_peers, "is_available", lambda tool: tool.frees_batch)
    monkeypatch.setattr(tuner_peers, "CASES", {})
    notes = tuner_peers.run(Context(device="cpu", quick=False)).notes
    assert f"not installed here and left out: {PEER}" in notes


@pytest.mark.skipif(not is_available(TOOLS[PEER]), reason="pytorch-autotune is not installed here")
def test_autotune_itself_answers_and_its_choice_is_a_plan_of_ours():
    case = CASES["digits, small transformer"]
    left = ask_tool(Question(tool=PEER, case=case.name, device="cpu", quick=True))
    assert left.failure is None
    assert left.said_speedup is not None
    assert left.said_speedup >= 1
    assert plan_of(case.resolve("cpu")).replace(**(left.settings or {}))["batch_size"] == 32


# The workloads.


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_each_workload_trains_by_the_peers_job_and_its_target_is_found(case):
    job = Job(case.build_workload("cpu"), device="cpu", n_steps=1)
    with silence_peers():
        job.run_steps(8)
    assert [(a.largest_step, a.status) for a in job.attempts] == [(8, "ok")]
    assert case.resolve("cpu").run.device == "cpu"


def test_turned_digits_are_the_same_whenever_they_are_read():
    dataset = CASES["digits turned as they are read"].build_workload("cpu").dataset()
    (first, label), (again, _) = dataset[3], dataset[3]
    assert first.shape == (1, 24, 24)
    assert first.equal(again)
    assert not first.equal(dataset[4][0])
    assert int(label) in range(10)
