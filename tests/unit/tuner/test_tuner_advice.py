"""What would make it faster still: every figure of a sentence by the rows it was made from."""

from __future__ import annotations

import dataclasses

import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import Facts, default_plan
from fulltilt.records import PhasesMs, Roof
from fulltilt.tuner.answer.advice import build_advice, compute_bound, compute_roof_share, find_ceilings
from fulltilt.tuner.answer.lever_advice import build_lever_advice, compute_effect

PLAN = default_plan({"batch_size": 100})
FACTS = Facts(device_type="cpu", has_conv=True, has_any_conv=True, has_c_compiler=True, optimizer="AdamW")
ROOFS = (
    Roof(name="matmul fp32", unit="tflops", measured=2.0, measured_ci95=(1.9, 2.1)),
    Roof(name="memory copy", unit="gib_per_s", measured=20.0, measured_ci95=(19.0, 21.0)),
)


def make_row(number, rate=1000.0, *, kind="end_to_end", status="ok", reason=None, spread_pct=1.0, **levers):
    answer = Answer(samples_per_s=rate, status=status, reason=reason, spread_pct=spread_pct)
    row = SimulatedTarget(lambda _: answer)(PLAN.replace(**levers), id=f"t{number}", why="")
    return dataclasses.replace(row, kind=kind)


def with_phases(row, **phases):
    usual = {"data_wait": 0.0, "h2d": None, "forward": 30.0, "backward": 50.0, "optimizer": 10.0, "other": 10.0}
    return dataclasses.replace(row, phases_ms=PhasesMs(**(usual | phases), step=100.0))


def test_times_of_a_slow_step_are_written_out():
    """``2.66e+03 of 2.66e+03 ms``"""
    slow = with_phases(make_row(1))
    slow = dataclasses.replace(
        slow,
        phases_ms=PhasesMs(
            forward=1180.0, backward=1480.0, step=2660.0, data_wait=0.0, h2d=None, optimizer=0.0, other=0.0
        ),
    )
    assert "(2,660 of 2,660 ms in t1), most of it backward (1,480 ms)" in compute_bound(slow)[0].text


def test_a_step_bound_by_compute_names_its_longest_phase():
    bound, _ = compute_bound(with_phases(make_row(1)))
    assert (bound.kind, bound.phase, bound.share_pct, bound.ceiling_pct) == ("compute", "backward", 80.0, None)
    assert "80 % of the step is forward and backward (80 of 100 ms in t1), most of it backward (50 ms)" in bound.text


def test_advice_on_a_busy_row_says_so():
    """``99 % of the step is forward and backward`` and ``MFU 0.31 %`` were of rows that waited for a core."""
    quiet = dataclasses.replace(with_phases(make_row(1, 1000.0)), flops_per_sample=1e9)
    for row, busy_ids in ((quiet, ()), (dataclasses.replace(quiet, cpu_pressure_pct=83.4), ("t1",))):
        ceilings = find_ceilings(row, [make_row(2, 1500.0, kind="device")])
        parts = [compute_bound(row)[0], compute_roof_share(row, ROOFS)[0], ceilings[0]]
        assert [part.busy_ids for part in parts] == [busy_ids] * 3
    busy = dataclasses.replace(make_row(2, 1500.0, kind="device"), cpu_pressure_pct=83.4)
    (ceiling,) = find_ceilings(quiet, [busy])
    assert ceiling.busy_ids == ("t2",)


def test_a_step_bound_by_data_says_what_could_be_gained_at_most():
    bound, _ = compute_bound(with_phases(make_row(1), data_wait=60.0, forward=10.0, backward=20.0, other=0.0))
    assert (bound.kind, bound.share_pct) == ("data", 60.0)
    assert bound.ceiling_pct == pytest.approx(150.0)  # 100 ms become 40
    assert "rise by 150 % at most" in bound.text


def test_phases_that_are_withheld_bound_nothing():
    blind = dataclasses.replace(make_row(7), phases_ms=None, null_reasons={"phases_ms": "no phase claims 12 %"})
    assert compute_bound(blind) == (None, "no phase claims 12 %")


def test_mfu_is_flops_over_time_over_the_measured_roof():
    row = with_phases(dataclasses.replace(make_row(1, 1000.0), flops_per_sample=1e9, flops_coverage_pct=100.0))
    share, reason = compute_roof_share(row, ROOFS)
    assert reason is None
    assert share.achieved_tflops == pytest.approx(1.0)
    assert share.mfu_pct == pytest.approx(50.0)
    assert share.mfu_ci95_pct == pytest.approx((100 * 0.99 / 2.1, 100 * 1.01 / 1.9))
    assert share.roof_fraction_pct == pytest.approx(100 * (1e9 * 100 / 1e12) / 0.080 / 2.0)
    assert "MFU 50 %" in share.text
    assert "known for 100 % of the operators that compute" in share.text
    assert "lower bound" not in share.text


def test_mfu_of_several_gpus_is_that_of_one_of_them():
    """Two ranks at a roof's half each were once called 100 % of it."""
    row = with_phases(dataclasses.replace(make_row(1, 2000.0), flops_per_sample=1e9, n_devices=2))
    share, _ = compute_roof_share(row, ROOFS, n_roofs=2)
    assert share.mfu_pct == pytest.approx(50.0)
    assert share.roof_fraction_pct == pytest.approx(100 * (1e9 * 100 / 1e12) / 0.080 / 2.0 / 2)
    assert share.text.endswith("of each of 2 devices, on average")
    on_gpus = dataclasses.replace(FACTS, device_type="cuda")
    shares = [build_advice(row, [row], roofs=ROOFS, axes={}, facts=facts)[0].roof for facts in (FACTS, on_gpus)]
    assert [share.mfu_pct for share in shares] == pytest.approx([100.0, 50.0]), "ranks on a CPU share its roof"


def test_flops_that_are_not_all_known_make_lower_bounds():
    row = dataclasses.replace(make_row(1), flops_per_sample=1e9, flops_coverage_pct=80.0, phases_ms=None)
    share, _ = compute_roof_share(row, ROOFS)
    assert "80 % of the operators that compute, so these are lower bounds" in share.text
    assert share.roof_fraction_pct is None


@pytest.mark.parametrize(
    ("interval", "said"),
    [((450.0, 1500.0), "MFU 50 % (21 to 79 %):"), ((0.01, 19_000.0), "MFU about 50 %, the machine was too noisy to")],
)
def test_an_interval_of_mfu_that_says_nothing_is_called_noise(interval, said):
    """On a machine full of other programs it once read: 0.0033 to 5936 %."""
    row = dataclasses.replace(make_row(1, 1000.0), flops_per_sample=1e9, samples_per_s_ci95=interval)
    share, _ = compute_roof_share(row, ROOFS)
    assert share.text.startswith(said)


@pytest.mark.parametrize(
    ("row", "roofs", "words"),
    [
        (make_row(1), (), "no roof was measured in this search"),
        (make_row(1, precision="bf16"), ROOFS, "no roof was measured for bf16; there is matmul fp32, memory copy"),
        (
            dataclasses.replace(make_row(1), null_reasons={"flops_per_sample": "the step could not be counted"}),
            ROOFS,
            "the step could not be counted",
        ),
    ],
)
def test_a_roof_that_cannot_be_compared_with_is_null_with_the_reason(row, roofs, words):
    assert compute_roof_share(row, roofs) == (None, words)


def test_a_roof_below_the_plan_itself_is_none():
    """Measured in a slower minute, a roof would put MFU above 100 %."""
    row = dataclasses.replace(make_row(1, 1000.0), flops_per_sample=3e9, flops_coverage_pct=100.0)
    share, reason = compute_roof_share(row, ROOFS)
    assert share is None
    assert "reached 2 TFLOP/s when the roof was measured, less than the plan itself" in reason


def test_reasons_of_missing_parts_are_named_by_their_place():
    row = dataclasses.replace(make_row(1), phases_ms=None, null_reasons={"phases_ms": "they do not close"})
    advice, reasons = build_advice(row, [row], axes={}, facts=FACTS)
    assert (advice.bound, advice.roof) == (None, None)
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
    assert [(ceiling.kind, ceiling.trial_id, ceiling.samples_per_s) for ceiling in found] == [
        ("device", "t2", 1000.0),
        ("loader", "t4", 950.0),
    ]
    assert "reaches 1,000 samples/s (t2), both together 900" in found[0].text
    assert ["the slower side" in ceiling.text for ceiling in found] == [False, True]


def advise(recommended, rows, *, axes=None, facts=FACTS, **given):
    found = build_lever_advice(recommended, [recommended, *rows], axes=axes or {}, facts=facts, **given)
    return {(advice.lever, advice.value): advice for advice in found}


def test_a_lever_that_was_tried_alone_says_what_it_did():
    best = make_row(1, 1000.0)
    made = advise(best, [make_row(2, 900.0, compile=True), make_row(3, 950.0, compile=True, num_workers=2)])
    tried = made["compile", True]
    assert (tried.state, tried.trial_id) == ("tried alone", "t2")
    assert tried.effect_pct == pytest.approx(-10.0)
    assert "compile yes (t2) was 10.0 % slower" in tried.text


def test_a_lever_that_was_only_tried_in_company_names_the_company():
    made = advise(make_row(1, 1000.0), [make_row(3, 950.0, compile=True, num_workers=2)])
    assert made["compile", True].state == "tried in company"
    assert "in t3, which differs in num_workers too, was 5.0 % slower" in made["compile", True].text


def test_a_probe_of_the_lever_alone_says_more_than_a_run_in_company():
    best = make_row(1, 1000.0, num_workers=2)
    probes = [
        make_row(5, 2000.0, kind="device", batch_size=50),
        make_row(6, 1000.0, kind="device", batch_size=50, compile=True),
        make_row(7, 5000.0, kind="device", compile=True),
        make_row(8, None, kind="memory", status="error", batch_size=50, compile=True),
    ]
    made = advise(best, [make_row(3, 950.0, compile=True, num_workers=0)], probes=probes)
    probed = made["compile", True]
    assert (probed.state, probed.trial_id) == ("probed alone", "t6")
    assert probed.effect_pct == pytest.approx(-50.0)
    assert "compile yes, the step alone (t6 against t5), was 50.0 % slower" in probed.text


def test_advice_on_a_lever_says_where_its_rows_are_of_a_busy_machine():
    best, quiet = make_row(1, 1000.0), make_row(2, 900.0, compile=True)
    assert advise(best, [quiet])["compile", True].busy_ids == ()
    busy = dataclasses.replace(quiet, cpu_pressure_pct=83.4)
    assert advise(best, [busy])["compile", True].busy_ids == ("t2",)
    probes = [make_row(5, 2000.0, kind="device", batch_size=50)]
    probes.append(dataclasses.replace(busy, kind="device", plan=busy.plan.replace(batch_size=50)))
    assert advise(best, [], probes=probes)["compile", True].busy_ids == ("t2",)


def test_a_difference_within_the_intervals_is_none():
    made = advise(make_row(1, 1000.0, spread_pct=4.0), [make_row(2, 990.0, spread_pct=4.0, channels_last=True)])
    assert "made no difference that shows: -1.0 %" in made["channels_last", True].text


def test_a_difference_below_the_spread_of_one_plan_says_so():
    made = advise(make_row(1, 1000.0, spread_pct=0.1), [make_row(2, 950.0, compile=True)], noise_pct=8.0)
    assert "less than the 8 % that runs of one plan lay apart" in made["compile", True].text


def test_levers_that_never_ran_say_why_and_what_they_need():
    rows = [
        make_row(2, None, status="error", reason="no kernel", fused_optimizer=True),
        make_row(3, None, status="skipped", reason="not on this model", channels_last=True),
    ]
    made = advise(make_row(1), rows, axes={"precision": ("fp32", "bf16")})
    assert made["compile", True].state == "not in the space"
    assert "benchmark.levers.compile: [false, true] tries it" in made["compile", True].text
    assert made["precision", "bf16"].state == "not reached"
    assert made["fused_optimizer", True].state == "failed"
    assert "t2 error: no kernel" in made["fused_optimizer", True].text
    assert made["channels_last", True].state == "cannot apply"
    assert "not on this model" in made["channels_last", True].text
    assert "cuDNN runs on CUDA devices only" in made["cudnn_benchmark", True].text
    assert all(advice.effect_pct is None for advice in made.values())


def test_levers_in_force_and_levers_that_buy_memory_are_not_asked_for():
    made = advise(make_row(1, compile=True, precision="bf16"), [])
    assert ("compile", True) not in made
    assert ("precision", "bf16") not in made
    assert not any(lever == "activation_checkpointing" for lever, _ in made)


def test_the_interval_of_an_effect_joins_those_of_both_runs():
    effect_pct, (low, high) = compute_effect(make_row(1, 1000.0, spread_pct=3.0), make_row(2, 1100.0, spread_pct=4.0))
    assert effect_pct == pytest.approx(10.0)
    assert (low, high) == pytest.approx((10.0 - 5.5, 10.0 + 5.5), abs=0.2)


def test_nothing_is_more_than_a_hundred_per_cent_slower():
    """-107.4 to -55.1 % stood there, of a run that was known to more than ± 100 %."""
    slow = dataclasses.replace(make_row(2, 190.0), samples_per_s_ci95=(-40.0, 420.0))
    effect_pct, (low, high) = compute_effect(make_row(1, 1000.0), slow)
    assert effect_pct == pytest.approx(-81.0)
    assert -100.0 < low < -81.0 < high


def test_a_lever_whose_plan_is_a_tie_is_not_only_called_slower():
    best, other = make_row(1, 1000.0), make_row(2, 900.0, compile=True)
    assert "among the ties" not in advise(best, [other])["compile", True].text
    said = advise(best, [other], tied={other.plan})["compile", True].text
    assert said.endswith("; its plan is among the ties: all runs together do not tell the two apart")
