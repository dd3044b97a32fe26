"""What would make it faster still: every figure of a sentence by the rows it was made from."""

from __future__ import annotations

import dataclasses
import functools

import pytest
from tests.unit.tuner import tuner_cases
from tests.unit.tuner.tuner_cases import make_turns

from fulltilt.levers import Facts, default_plan
from fulltilt.records import PhasesMs, Roof
from fulltilt.tuner.answer.advice import build_advice, compute_bound, compute_roof_share, find_ceilings
from fulltilt.tuner.answer.lever_advice import Findings, build_lever_advice, compute_effect

make_row = functools.partial(tuner_cases.make_row, plan=default_plan({"batch_size": 100}), spread_pct=1.0)
BEST = make_row(1, 1000.0)
FACTS = Facts(device_type="cpu", has_conv=True, has_any_conv=True, has_c_compiler=True, optimizer="AdamW")
ROOFS = (
    Roof(name="matmul fp32", unit="tflops", measured=2.0, measured_ci95=(1.9, 2.1)),
    Roof(name="memory copy", unit="gib_per_s", measured=20.0, measured_ci95=(19.0, 21.0)),
)


def with_phases(row, *, step=100.0, **phases):
    usual = {"data_wait": 0.0, "h2d": None, "forward": 30.0, "backward": 50.0, "optimizer": 10.0, "other": 10.0}
    return dataclasses.replace(row, phases_ms=PhasesMs(**(usual | phases), step=step))


def with_flops(row, n_giga=1.0, **changes):
    return dataclasses.replace(row, flops_per_sample=n_giga * 1e9, **changes)


def make_busy(row):
    return dataclasses.replace(row, cpu_pressure_pct=83.4)


def advise(recommended, rows, *, axes=None, facts=FACTS, **given):
    found = Findings(recommended=recommended, rows=[recommended, *rows], axes=axes or {}, facts=facts, **given)
    return {(advice.lever, advice.value): advice for advice in build_lever_advice(found)}


COMPILED_PROBE = {"kind": "device", "batch_size": 50, "compile": True}
LONG = {"step": 2660.0, "forward": 1180.0, "backward": 1480.0, "optimizer": 0.0, "other": 0.0}
WAITING = {"data_wait": 60.0, "forward": 10.0, "backward": 20.0, "other": 0.0}


@pytest.mark.parametrize(
    ("phases", "bound", "said"),
    [
        ({}, ("compute", "backward", 80.0, None), "80 % of the step is forward and backward (80 of 100 ms in t1)"),
        (LONG, ("compute", "backward", 100.0, None), "(2,660 of 2,660 ms in t1), most of it backward (1,480 ms)"),
        (WAITING, ("data", "data_wait", 60.0, pytest.approx(150.0)), "rise by 150 % at most"),  # 100 ms become 40
    ],
)
def test_a_step_is_bound_by_its_longest_part_and_says_what_could_be_gained_at_most(phases, bound, said):
    made, _ = compute_bound(with_phases(BEST, **phases))
    assert (made.kind, made.phase, made.share_pct, made.ceiling_pct) == bound
    assert said in made.text


def test_advice_on_a_busy_row_says_so():
    """``99 % of the step is forward and backward`` and ``MFU 0.31 %`` were of rows that waited for a core."""
    quiet, probe = with_flops(with_phases(BEST)), make_row(2, 1500.0, kind="device")
    for row, busy_ids in ((quiet, ()), (make_busy(quiet), ("t1",))):
        parts = [compute_bound(row)[0], compute_roof_share(row, ROOFS)[0], find_ceilings(row, [probe])[0]]
        assert [part.busy_ids for part in parts] == [busy_ids] * 3
    assert find_ceilings(quiet, [make_busy(probe)])[0].busy_ids == ("t2",)
    assert advise(BEST, [ALONE])["compile", True].busy_ids == ()
    assert advise(BEST, [make_busy(ALONE)])["compile", True].busy_ids == ("t2",)
    probes = [make_row(5, 2000.0, kind="device", batch_size=50), make_busy(make_row(2, 900.0, **COMPILED_PROBE))]
    assert advise(BEST, [], probes=probes)["compile", True].busy_ids == ("t2",)


def test_mfu_is_flops_over_time_over_the_measured_roof():
    share, reason = compute_roof_share(with_flops(with_phases(BEST), flops_coverage_pct=100.0), ROOFS)
    assert reason is None
    assert (share.achieved_tflops, share.mfu_pct) == pytest.approx((1.0, 50.0))
    assert share.mfu_ci95_pct == pytest.approx((100 * 0.99 / 2.1, 100 * 1.01 / 1.9))
    assert share.roof_fraction_pct == pytest.approx(100 * (1e9 * 100 / 1e12) / 0.080 / 2.0)
    assert all(words in share.text for words in ("MFU 50 %", "known for 100 % of the operators that compute"))
    assert "lower bound" not in share.text


def test_mfu_of_several_gpus_is_that_of_one_of_them():
    row = with_flops(with_phases(make_row(1, 2000.0)), n_devices=2)
    share, _ = compute_roof_share(row, ROOFS, n_roofs=2)
    assert share.mfu_pct == pytest.approx(50.0)
    assert share.roof_fraction_pct == pytest.approx(100 * (1e9 * 100 / 1e12) / 0.080 / 2.0 / 2)
    assert share.text.endswith("of each of 2 devices, on average")
    for device_type, mfu_pct in (("cpu", 100.0), ("cuda", 50.0)):  # ranks on a CPU share its roof
        facts = dataclasses.replace(FACTS, device_type=device_type)
        advice, _ = build_advice(Findings(recommended=row, rows=[row], roofs=ROOFS, axes={}, facts=facts))
        assert advice.roof.mfu_pct == pytest.approx(mfu_pct)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"flops_coverage_pct": 80.0}, "80 % of the operators that compute, so these are lower bounds"),
        ({"samples_per_s_ci95": (450.0, 1500.0)}, "MFU 50 % (21 to 79 %):"),
        # on a machine full of other programs it once read: 0.0033 to 5936 %
        ({"samples_per_s_ci95": (0.01, 19_000.0)}, "MFU about 50 %, the machine was too noisy to tell:"),
    ],
)
def test_mfu_says_how_far_it_is_known(changes, said):
    share, _ = compute_roof_share(with_flops(BEST, phases_ms=None, **changes), ROOFS)
    assert said in share.text
    assert share.roof_fraction_pct is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (make_row(1, 9.0, precision="bf16"), "no roof was measured for bf16; there is matmul fp32, memory copy"),
        (dataclasses.replace(BEST, null_reasons={"flops_per_sample": "not counted"}), "not counted"),
        (with_flops(BEST, 3.0), "2 TFLOP/s when the roof was measured, less than the plan itself: the machine was"),
    ],
    ids=["a precision without a roof", "no FLOPs", "the roof is of a slower minute"],
)
def test_a_roof_that_cannot_be_compared_with_is_null_with_the_reason(row, words):
    share, reason = compute_roof_share(row, ROOFS)
    assert share is None
    assert words in reason


def test_reasons_of_missing_parts_are_named_by_their_place():
    row = dataclasses.replace(BEST, phases_ms=None, null_reasons={"phases_ms": "they do not close"})
    advice, reasons = build_advice(Findings(recommended=row, rows=[row], axes={}, facts=FACTS))
    assert (advice.bound, advice.roof) == (None, None), "phases that are withheld bound nothing"
    assert reasons == {"advice.bound": "they do not close", "advice.roof": "no roof was measured in this search"}


def test_probes_of_the_plans_own_parts_stand_beside_it_and_others_do_not():
    row = make_row(1, 900.0, num_workers=2, precision="bf16")
    probes = [
        make_row(2, 1000.0, kind="device", precision="bf16"),
        make_row(3, 5000.0, kind="device", precision="fp32"),
        make_row(4, 950.0, kind="loader", num_workers=2),
        make_row(5, 4000.0, kind="loader", num_workers=4),
        make_row(6, 7000.0, kind="device", precision="bf16", batch_size=50),
        make_row(7, None, kind="device", status="error", precision="bf16"),
    ]
    found = find_ceilings(row, probes)
    expected = [("device", "t2", 1000.0), ("loader", "t4", 950.0)]
    assert [(ceiling.kind, ceiling.trial_id, ceiling.samples_per_s) for ceiling in found] == expected
    assert "reaches 1,000 samples/s (t2), both together 900" in found[0].text
    assert ["the slower side" in ceiling.text for ceiling in found] == [False, True]


TURNS = make_turns(9, 1, 1800.0, plan=BEST.plan, compile=True)
ALONE, IN_COMPANY = make_row(2, 900.0, compile=True), make_row(3, 950.0, compile=True, num_workers=2)
SPREAD = make_row(2, 990.0, spread_pct=4.0, compile=True)
TIED = "; its plan is among the ties: all runs together do not tell the two apart"


@pytest.mark.parametrize(
    ("rows", "given", "state", "effect_pct", "said"),
    [
        ([ALONE, IN_COMPANY], {}, "tried alone", -10.0, "compile yes (t2) was 10.0 % slower"),
        ([IN_COMPANY], {}, "tried in company", -5.0, "in t3, which differs in num_workers too, was 5.0 % slower"),
        ([SPREAD], {}, "tried alone", -1.0, "made no difference that shows: -1.0 %"),
        ([ALONE, TURNS], {}, "tried alone", -10.0, "compile yes (t2) was 10.0 % slower"),  # turns had another machine
        ([ALONE], {"tied": {ALONE.plan}}, "tried alone", -10.0, TIED),
    ],
)
def test_a_lever_that_was_tried_says_what_it_did_and_in_what_company(rows, given, state, effect_pct, said):
    tried = advise(BEST, rows, **given)["compile", True]
    assert (tried.state, tried.trial_id, tried.effect_pct) == (state, rows[0].id, pytest.approx(effect_pct))
    assert said in tried.text
    assert (TIED in tried.text) == ("tied" in given)


def test_a_probe_of_the_lever_alone_says_more_than_a_run_in_company():
    best = make_row(1, 1000.0, num_workers=2)
    probes = [
        make_row(5, 2000.0, kind="device", batch_size=50),
        make_row(6, 1000.0, kind="device", batch_size=50, compile=True),
        make_row(7, 5000.0, kind="device", compile=True),
        make_row(8, None, kind="memory", status="error", batch_size=50, compile=True),
    ]
    probed = advise(best, [make_row(3, 950.0, compile=True, num_workers=0)], probes=probes)["compile", True]
    assert (probed.state, probed.trial_id, probed.effect_pct) == ("probed alone", "t6", pytest.approx(-50.0))
    assert "compile yes, the step alone (t6 against t5), was 50.0 % slower" in probed.text


@pytest.mark.parametrize(
    ("lever", "value", "state", "said"),
    [
        ("compile", True, "not in the space", "benchmark.levers.compile: [false, true] tries it"),
        ("precision", "bf16", "not reached", ""),
        ("fused_optimizer", True, "failed", "t2 error: no kernel"),
        ("channels_last", True, "cannot apply", "not on this model"),
        ("cudnn_benchmark", True, "cannot apply", "cuDNN runs on CUDA devices only"),
    ],
)
def test_a_lever_that_never_ran_says_why_and_what_it_needs(lever, value, state, said):
    failed = make_row(2, None, status="error", reason="no kernel", fused_optimizer=True)
    skipped = make_row(3, None, status="skipped", reason="not on this model", channels_last=True)
    made = advise(BEST, [failed, skipped], axes={"precision": ("fp32", "bf16")})[lever, value]
    assert (made.state, made.effect_pct) == (state, None)
    assert said in made.text
    # levers in force and levers that buy memory are not asked for
    asked_for = advise(make_row(1, 1000.0, compile=True, precision="bf16"), [])
    assert not {("compile", True), ("precision", "bf16")} & set(asked_for)
    assert "activation_checkpointing" not in {lever for lever, _ in asked_for}


def test_the_interval_of_an_effect_joins_those_of_both_runs():
    effect_pct, (low, high) = compute_effect(make_row(1, 1000.0, spread_pct=3.0), make_row(2, 1100.0, spread_pct=4.0))
    assert effect_pct == pytest.approx(10.0)
    assert (low, high) == pytest.approx((10.0 - 5.5, 10.0 + 5.5), abs=0.2)
    slow = dataclasses.replace(make_row(2, 190.0), samples_per_s_ci95=(-40.0, 420.0))
    effect_pct, (low, high) = compute_effect(BEST, slow)
    assert effect_pct == pytest.approx(-81.0)
    assert -100.0 < low < effect_pct < high, "nothing is more than a hundred per cent slower"
