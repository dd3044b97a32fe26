"""The JSON document: its schema, its way back, and a reason for every null."""

import dataclasses
import json
import math

import jsonschema
import pytest
from tests.simulated_target import Answer, SimulatedTarget
from tests.unit.tuner.tuner_cases import USER, make_row, make_turns, search_to_the_end

from fulltilt.levers import Facts
from fulltilt.records import Roof
from fulltilt.report.verdict import describe_verdict
from fulltilt.tuner.answer.conclude import conclude, select_rows
from fulltilt.tuner.answer.picks import Pick
from fulltilt.tuner.answer.quality import judge
from fulltilt.tuner.answer.result import EpochSeconds, TuneResult, build_epoch_seconds, read_schema
from fulltilt.tuner.answer.verify import add_verification
from fulltilt.tuner.question.space import Space
from fulltilt.tuner.search.journal import Journal
from fulltilt.tuner.search.session import Session

FACTS = Facts(device_type="cpu")
SPACE = Space(axes={"batch_size": (64, 128)}, base=USER, user_plan=USER, facts=FACTS, memory_gib=6.4)
ROOF = Roof(name="matmul fp32", unit="tflops", measured=1.0, measured_ci95=(0.9, 1.1))


class Target(SimulatedTarget):
    """Whole runs have the figures that advice is made from, too."""

    def __call__(self, plan, **asked):
        row = super().__call__(plan, **asked)
        figures = {"flops_per_sample": 1e9, "flops_coverage_pct": 100.0, "cpu_pressure_pct": 50.0}
        return dataclasses.replace(row, **figures) if row.status == "ok" else row


def build_result(gain_pct=80.0, *, roofs=(ROOF,), n_samples=1800, fails=None, noise_pct=0.0):
    """A search whose finalist is so much faster than the user's own plan, with probes and roofs.

    Args:
        fails: Batch size of a plan that fails in turns.
    """
    ends = {32: Answer(samples_per_s=100.0), 64: Answer(samples_per_s=100.0 + gain_pct)}
    answer = lambda plan: ends.get(plan["batch_size"], Answer(status="out_of_memory"))  # noqa: E731
    in_turns = lambda plan: Answer(status="error") if plan["batch_size"] == fails else answer(plan)  # noqa: E731
    target = Target(answer, in_turns=in_turns, noise_pct=noise_pct)
    session = Session(target, Journal())
    workload = {"learning_rate": 0.1, "n_samples": n_samples}
    made, proof = search_to_the_end(session, SPACE, workload=workload, run={"epochs": 10})
    probe = dataclasses.replace(session.rows[1], id="t90", kind="device")
    estimate = dataclasses.replace(probe, id="t91", kind="memory", samples_per_s=None, samples_per_s_ci95=None)
    session.probes += [probe, estimate]
    return conclude(made, proof, roofs, "none was measured")


def test_a_gain_that_is_not_proven_is_told_of_the_plan_and_the_settings_as_they_were_stay():
    unproven, proven = build_result(0.0), build_result()
    assert (unproven.savings.verdict, proven.savings.verdict) == ("equal", "faster")
    assert unproven.picks.recommended.trial == unproven.baseline
    assert unproven.picks.unproven.trial.id in unproven.picks.recommended.tied_with
    assert (proven.picks.unproven, proven.picks.recommended.tied_with) == (None, ())
    assert proven.picks.throughput.trial == proven.picks.recommended.trial
    assert proven.learning_rate.to == pytest.approx(0.1 * 2**0.5)
    assert (unproven.learning_rate.rule, unproven.learning_rate.to) == ("sqrt", 0.1), "of the recommended plan"


@pytest.mark.parametrize("fails", [None, 32, 64])
@pytest.mark.parametrize("noise_pct", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("gain_pct", [-40.0, 0.0, 0.8, 6.0, 80.0])
def test_the_pick_the_savings_and_the_sentence_say_the_same(gain_pct, noise_pct, fails):
    document = build_result(gain_pct, noise_pct=noise_pct, fails=fails).to_document()
    pick, savings, sentence = document["picks"]["recommended"], document["savings"] or {}, describe_verdict(document)
    is_proven = pick["proven"] is True
    assert (savings.get("verdict") == "faster") == is_proven
    assert (", proven; " in sentence) == is_proven
    assert sentence.startswith("Keep your settings") == (not is_proven)
    assert (pick["plan"] == document["user_plan"]) == (not is_proven)
    assert (document["picks"]["unproven"] or {}).get("proven") in (False, None)
    assert is_proven or noise_pct or fails or gain_pct < 5, "80 and 6 % without noise are proven"


def test_the_row_of_a_plan_is_its_first_whole_run_or_the_turn_in_which_it_failed():
    rows = [make_row(1, 100.0), make_row(2, 120.0, num_workers=2), make_row(3, 130.0, num_workers=2)]
    turns = [make_turns(4, 1, 90.0), make_turns(5, 1, 95.0, num_workers=2)]
    assert [row.id for row in select_rows(rows, turns, USER)] == ["t1", "t2"]
    turns += [make_turns(n, 2, None, status="timeout", num_workers=workers) for n, workers in ((6, 2), (7, 0))]
    assert [row.id for row in select_rows(rows, turns, USER)] == ["t1", "t6"], "the user's own stays"


def build_verification(after=0.9):
    runs = [
        {"arm": arm, "seed": seed, "folder": "f", "training_seconds": 2.0, "samples_per_s": 5.0,
         "evaluations": [{"training_seconds": 2.0, "metrics": {"loss": 0.1, "accuracy": quality + seed / 1000}}]}
        for arm, quality in (("as it was", 0.9), ("recommended", after)) for seed in (1, 2)
    ]  # fmt: skip
    return judge(runs, {"data.batch_size": 64})


def test_a_proven_plan_that_learned_worse_is_no_recommendation_in_the_document_either():
    """The text said "Keep your settings", and the JSON beside it recommended the plan, proven, with its savings."""
    found = build_result()
    result = add_verification(found, build_verification(after=0.5))
    document = json.loads(result.to_json_text())
    jsonschema.validate(document, read_schema())
    assert TuneResult.read(document) == result
    kept, other = document["picks"]["recommended"], document["picks"]["unproven"]
    assert (kept["plan"], kept["proven"]) == (document["user_plan"], None)
    assert (other["id"], other["proven"]) == (found.picks.recommended.trial.id, False)
    assert other["gain"]["verdict"] == "faster", "that stands"
    assert (document["savings"]["verdict"], document["savings"]["recommended_id"]) == ("same plan", kept["id"])
    assert {f"savings.{name}" for name, value in document["savings"].items() if value is None} <= {*result.null_reasons}
    assert document["learning_rate"]["to"] == document["learning_rate"]["from"] == 0.1
    assert document["epoch_seconds"]["estimate"] == pytest.approx(18.0), "of the settings as they were"
    assert describe_verdict(document).startswith("Keep your settings: the fastest plan is 1.80 × as fast")
    assert describe_verdict(document).endswith("but learned worse.")
    verdict, plan, _ = repr(result).splitlines()
    assert (verdict, plan.partition(" ")[0]) == (describe_verdict(document), "other")


@pytest.mark.parametrize(("gain_pct", "after"), [(80.0, 0.9), (0.0, 0.5)])
def test_the_picks_stay_where_the_plan_learns_as_well_or_nothing_was_proven(gain_pct, after):
    found, verification = build_result(gain_pct), build_verification(after)
    result = add_verification(found, verification)
    assert (result.picks, result.savings, result.verification) == (found.picks, found.savings, verification)
    assert "verification" not in result.null_reasons


def test_the_document_follows_its_schema_and_comes_back():
    verified = dataclasses.replace(build_result(), verification=build_verification())
    unproven = build_result(0.0)
    for result in (unproven, verified, dataclasses.replace(verified, savings=None, advice=None, verification=None)):
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
    assert set(document["picks"]) == {"throughput", "efficiency", "recommended", "memory", "unproven"}
    for made in filter(None, document["picks"].values()):
        assert rows[made["id"]].items() <= made.items()
        assert {"rule", "proven", "gain", "tied_with", "changes"} <= made.keys()
    assert {row["kind"] for row in document["repeats"]} == {"repeat"}
    assert document["search"]["n_groups"] == len({row["group"] for row in document["repeats"]}) == 4


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
        lambda d: d["trials"][1].update(reason=None, status="error"),
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
    own = Pick(trial=make_row(1, 200.0, spread_pct=10.0), rule="")
    epoch = build_epoch_seconds(own, 1000, math.nan)
    assert epoch.estimate == 5.0
    assert epoch.ci95 == pytest.approx((1000 / 220, 1000 / 180))
    assert build_epoch_seconds(own, None, math.nan) == EpochSeconds(estimate=None, ci95=None)
    assert build_epoch_seconds(own, 1000, 250.0) == EpochSeconds(estimate=4.0, ci95=None), "by its turns"


def test_an_epoch_takes_what_the_gain_in_turns_leaves_of_the_users_own():
    result = build_result()
    epoch = build_epoch_seconds(result.picks.recommended, 2000, result.savings.before_samples_per_s)
    assert epoch.estimate == pytest.approx(2000 / result.savings.after_samples_per_s)
    assert epoch.ci95[0] <= epoch.estimate <= epoch.ci95[1]
