"""The JSON document: its schema, its way back, and a reason for every null."""

import dataclasses
import itertools
import json

import jsonschema
import pytest
from tests.simulated_target import Answer, SimulatedTarget
from tests.unit.tuner.tuner_cases import USER, make_row, run_beside, search_to_the_end

from fulltilt.levers import Facts
from fulltilt.records import Roof
from fulltilt.tuner.answer.conclude import conclude, tie_with_baseline
from fulltilt.tuner.answer.quality import judge
from fulltilt.tuner.answer.result import EpochSeconds, TuneResult, build_epoch_seconds, read_schema
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.session import Session

FACTS = Facts(device_type="cpu")
SPACE = Space(axes={"batch_size": (64, 128)}, base=USER, user_plan=USER, facts=FACTS, memory_gib=6.4)
ROOF = Roof(name="matmul fp32", unit="tflops", measured=1.0, measured_ci95=(0.9, 1.1))


def build_result(rates=(180.0, 100.0, 101.0, 182.0), *, roofs=(ROOF,), n_samples=1800):
    """A search whose finalist and baseline ran side by side at these rates, with probes and roofs."""
    ends = {64: Answer(samples_per_s=180.0), 128: Answer(status="out_of_memory")}
    again = itertools.cycle(rates)

    def answer(plan, *, id, why, kind="end_to_end"):
        end = ends[plan["batch_size"]] if kind == "end_to_end" else Answer(samples_per_s=next(again))
        row = SimulatedTarget(lambda _: end)(plan, id=id, why=why, kind=kind)
        figures = {"flops_per_sample": 1e9, "flops_coverage_pct": 100.0, "cpu_pressure_pct": 50.0}
        return dataclasses.replace(row, **figures) if row.status == "ok" else row

    session = Session(answer, Journal())
    workload = {"learning_rate": 0.1, "n_samples": n_samples}
    made = search_to_the_end(session, SPACE, workload=workload, run={"epochs": 10})
    probe = dataclasses.replace(session.rows[0], id="t20", kind="device")
    estimate = dataclasses.replace(probe, id="t21", kind="memory", samples_per_s=None, samples_per_s_ci95=None)
    session.probes += [probe, estimate]
    return conclude(made, roofs, "none was measured")


def test_a_gain_that_is_not_proven_is_a_tie_with_the_settings_as_they_were():
    unproven = build_result(rates=(180.0, 100.0, 170.0, 182.0))
    assert unproven.savings.verdict == "no gain"
    assert unproven.baseline.id in unproven.picks.recommended.tied_with
    assert unproven.picks.throughput.trial == unproven.picks.recommended.trial
    assert unproven.picks.throughput.tied_with == unproven.picks.recommended.tied_with, "one plan, one set of ties"
    assert unproven.search.n_undecided == len(unproven.picks.recommended.tied_with)
    assert build_result().picks.recommended.tied_with == ()
    # Of a plan of which a run failed the row is the failed one, and a tie with it stood beside its status.
    own, others = ([row for row in unproven.trials if (row.plan == USER) == is_own] for is_own in (True, False))
    failed = [dataclasses.replace(row, status="timeout", reason="no answer") for row in own]
    picks = recommend.pick(others, user_plan=USER, memory_limit_gib=8.0)
    before = dataclasses.replace(unproven, trials=(*failed, *others), picks=picks)
    assert tie_with_baseline(before) == before
    assert tie_with_baseline(dataclasses.replace(before, trials=unproven.trials)) != before


def build_verification():
    shared = {"folder": "f", "training_seconds": 2.0, "samples_per_s": 5.0}
    shared["evaluations"] = [{"training_seconds": 2.0, "metrics": {"loss": 0.1, "accuracy": 0.9}}]
    runs = [shared | {"arm": arm, "seed": seed} for arm in ("as it was", "recommended") for seed in (1, 2)]
    return judge(runs, {"data.batch_size": 64})


def test_the_document_follows_its_schema_and_comes_back():
    verified = dataclasses.replace(build_result(), verification=build_verification())
    for result in (verified, dataclasses.replace(verified, savings=None, advice=None, verification=None)):
        document = json.loads(result.to_json_text())
        jsonschema.validate(document, read_schema())
        assert TuneResult.read(document) == result
    assert document["learning_rate"] == {"rule": "sqrt", "from": 0.1, "to": pytest.approx(0.1 * 2**0.5)}
    assert next(iter(document)) == "version"
    picks = document.pop("picks")
    with pytest.raises(ValueError, match=r"TuneResult\.picks is missing"):
        TuneResult.read(document)
    document["trials"][0].update(samples_per_s="fast")
    with pytest.raises(ValueError, match=r"samples_per_s is 'fast' \(str\), expected float"):
        TuneResult.read(document | {"picks": picks})


def test_a_result_has_probes_savings_and_advice_and_picks_that_are_whole_rows_of_the_table():
    document = build_result().to_document()
    assert [probe["kind"] for probe in document["probes"]] == ["device", "memory"]
    assert document["savings"]["verdict"] == "faster"
    assert document["advice"]["roof"]["mfu_pct"] == pytest.approx(18.0)
    assert document["picks"]["memory"]["id"] == document["picks"]["recommended"]["id"]
    rows = {row["id"]: row for row in document["trials"]}
    assert set(document["picks"]) == {"throughput", "efficiency", "recommended", "memory"}
    for made in document["picks"].values():
        assert rows[made["id"]].items() <= made.items()
        assert {"rule", "tied_with", "changes"} <= made.keys()


def test_every_null_of_the_new_parts_has_its_reason():
    document = build_result(roofs=(), n_samples=None).to_document()
    nulls = {f"savings.{name}" for name, value in document["savings"].items() if value is None}
    nulls |= {f"advice.{name}" for name in ("bound", "roof") if document["advice"][name] is None}
    assert {"savings.before_s", "advice.roof"} <= nulls
    assert nulls <= set(document["null_reasons"])
    assert "verification" in document["null_reasons"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("picks"),
        lambda d: d["trials"][0].pop("samples_per_s"),
        lambda d: d["trials"][0].update(samples_per_s=None),
        lambda d: d["trials"][1].update(reason=None),
        lambda d: d["trials"][0].update(status="fine"),
        lambda d: d["trials"][0].update(kind="device"),
        lambda d: d["trials"][0]["plan"].update(precision="auto"),
        lambda d: d["picks"]["recommended"].update(status="error"),
        lambda d: d["picks"]["recommended"].pop("changes"),
        lambda d: d["search"].update(n_trials=-1),
        lambda d: d["probes"][0].update(kind="end_to_end"),
        lambda d: d["probes"][0].update(status="error"),
        lambda d: d["savings"].update(verdict="fast"),
        lambda d: d["advice"]["bound"].pop("share_pct"),
        lambda d: d["advice"]["levers"][0].update(state="maybe"),
        lambda d: d["verification"].update(n_pairs=1),
        lambda d: d["verification"]["runs"][0].update(curve=[]),
    ],
)
def test_the_schema_refuses_a_document_that_breaks_the_contract(damage):
    result = dataclasses.replace(build_result(), verification=build_verification())
    document = json.loads(result.to_json_text())
    damage(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, read_schema())


def test_an_epoch_is_samples_over_throughput_with_the_interval_turned_round():
    row = make_row(1, 200.0, spread_pct=10.0)
    epoch = build_epoch_seconds(row, 1000)
    assert epoch.estimate == 5.0
    assert epoch.ci95 == pytest.approx((1000 / 220, 1000 / 180))
    assert build_epoch_seconds(row, None) == EpochSeconds(estimate=None, ci95=None)
    blind = dataclasses.replace(row, samples_per_s_ci95=None)
    assert build_epoch_seconds(blind, 1000, runs=[blind]) == EpochSeconds(estimate=5.0, ci95=None)


def test_an_epochs_interval_holds_what_differs_between_processes_of_the_newest_comparison():
    runs = run_beside(5, 200.0, 230.0, 180.0, comparison="today", spread_pct=1.0)
    alone, together = (build_epoch_seconds(runs[0], 1000, runs=given) for given in ((), runs))
    assert (alone.estimate, alone.ci95) == (5.0, pytest.approx((1000 / 202, 1000 / 198)))
    assert together.estimate == pytest.approx(1000 / (200 * 230 * 180) ** (1 / 3)), "the base of what is saved"
    assert together.ci95[0] < 1000 / 230 < 1000 / 180 < together.ci95[1]
    old = run_beside(1, 50.0, 60.0, comparison="yesterday")
    others = run_beside(9, 400.0, 410.0, comparison="today", batch_size=64)
    assert build_epoch_seconds(runs[0], 1000, runs=[*old, *runs, *others]) == together
