"""The JSON document: its schema, its way back, and a reason for every null."""

from __future__ import annotations

import dataclasses
import json

import jsonschema
import pytest
from tests.simulated_target import Answer, SimulatedTarget

from fulltilt.levers import Facts, default_plan
from fulltilt.records import Machine, Roof
from fulltilt.tuner.answer.finish import finish_result, tie_with_baseline
from fulltilt.tuner.answer.hints import find_hints
from fulltilt.tuner.answer.quality import judge
from fulltilt.tuner.answer.result import EpochSeconds, SearchSummary, TuneResult, build_epoch_seconds, read_schema
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.picks.recommend import LearningRate

USER = default_plan({"batch_size": 32})
MACHINE = Machine(
    hostname_hash="0" * 12, system="Linux", is_wsl=False, cpu_model="cpu", n_cores_physical=2, n_cores_logical=2,
    n_cores_usable=2, memory_total_bytes=1, memory_available_bytes=1, memory_limit_bytes=None, shm_total_bytes=None,
    devices=(), python="3.11", packages={},
)  # fmt: skip


FACTS = Facts(device_type="cpu")
ROOF = Roof(name="matmul fp32", unit="tflops", measured=1.0, measured_ci95=(0.9, 1.1))


def build_finished(rates=(180.0, 100.0, 101.0, 182.0), **changes):
    """A result whose finalist and baseline ran side by side, with probes, roofs and a verification.

    Args:
        rates: Samples/s of finalist, baseline, baseline, finalist.
    """
    result = build_result()
    fast, user = result.trials[1].plan, USER
    rows = []
    for number, (plan, kind, rate) in enumerate(
        zip((fast, user, user, fast), ("repeat", "baseline", "baseline", "repeat"), rates, strict=True)
    ):
        row = SimulatedTarget(lambda _, rate=rate: Answer(samples_per_s=rate))(plan, id=f"t{10 + number}", why="")
        rows.append(dataclasses.replace(row, kind=kind, flops_per_sample=1e9, flops_coverage_pct=100.0))
    table, repeats = recommend.merge_repeats([*result.trials, *rows])
    probe = dataclasses.replace(rows[0], id="t20", kind="device")
    estimate = dataclasses.replace(probe, id="t21", kind="memory", samples_per_s=None, samples_per_s_ci95=None)
    counts = {"n_end_to_end": 7, "n_repeats": len(repeats), "n_probes": 1}
    given = {
        "machine": dataclasses.replace(MACHINE, roofs=(ROOF,)),
        "workload": {"name": "tiny", "n_samples": 1800},
        "trials": tuple(table),
        "repeats": tuple(repeats),
        "probes": (probe, estimate),
        "picks": recommend.pick(table, user_plan=USER, memory_limit_gib=8.0),
        "baseline": next(row for row in table if row.plan == USER),
        "search": dataclasses.replace(result.search, **counts),
    }
    given["epoch_seconds"] = build_epoch_seconds(given["picks"].recommended.trial, 1800)
    return finish_result(
        dataclasses.replace(result, **(given | changes)), axes={"batch_size": (32, 64)}, facts=FACTS, n_epochs=10
    )


def test_a_gain_that_is_not_proven_is_a_tie_with_the_settings_as_they_were():
    """``0 plans left undecided`` stood beside ``no gain that this search could prove``."""
    unproven = build_finished(rates=(180.0, 100.0, 170.0, 182.0))
    assert unproven.savings.verdict == "no gain"
    assert unproven.baseline.id in unproven.picks.recommended.tied_with
    assert unproven.picks.throughput.trial == unproven.picks.recommended.trial
    assert unproven.picks.throughput.tied_with == unproven.picks.recommended.tied_with, "one plan, one set of ties"
    assert unproven.search.n_undecided == len(unproven.picks.recommended.tied_with)
    assert build_finished().picks.recommended.tied_with == ()


def test_a_plan_of_which_a_run_failed_is_no_tie():
    """The row of the settings as they were is the failed one then, and a tie with it stood beside its status."""
    unproven = build_finished(rates=(180.0, 100.0, 170.0, 182.0))
    failed = tuple(
        dataclasses.replace(row, status="timeout", reason="no answer") if row.plan == USER else row
        for row in unproven.trials
    )
    picks = recommend.pick([row for row in unproven.trials if row.plan != USER], user_plan=USER, memory_limit_gib=8.0)
    before = dataclasses.replace(unproven, trials=failed, picks=picks)
    assert tie_with_baseline(before) == before
    assert tie_with_baseline(dataclasses.replace(before, trials=unproven.trials)) != before


def build_verification():
    documents = [
        {
            "arm": arm, "seed": seed, "folder": "f", "training_seconds": 2.0, "samples_per_s": 5.0,
            "evaluations": [{"training_seconds": 2.0, "metrics": {"loss": 0.1, "accuracy": 0.9}}],
        }
        for arm in ("as it was", "recommended") for seed in (1, 2)
    ]  # fmt: skip
    return judge(documents, {"data.batch_size": 64})


def build_result():
    ends = {32: Answer(samples_per_s=100.0), 64: Answer(samples_per_s=180.0), 128: Answer(status="out_of_memory")}
    target = SimulatedTarget(lambda plan: ends[plan["batch_size"]])
    rows = [target(USER.replace(batch_size=size), id=f"t{i}", why="grid") for i, size in enumerate(ends, start=1)]
    picks = recommend.pick(rows, user_plan=USER, memory_limit_gib=8.0)
    chosen = picks.recommended.trial
    return TuneResult(
        machine=MACHINE,
        workload={"name": "tiny"},
        trials=tuple(rows),
        picks=picks,
        search=SearchSummary(
            strategy="exhaustive", grid_size=3, n_trials=3, n_end_to_end=3, n_out_of_memory=1, seconds=3.0
        ),
        learning_rate=LearningRate(rule="sqrt", start=0.1, to=0.14),
        epoch_seconds=build_epoch_seconds(chosen, 1800),
        user_plan=USER,
        baseline=rows[0],
        hints=find_hints(dataclasses.replace(chosen, cpu_pressure_pct=50.0), 8.0),
    )


def test_the_document_follows_its_schema_and_comes_back():
    result = build_result()
    document = json.loads(result.to_json_text())
    jsonschema.validate(document, read_schema())
    assert TuneResult.read(document) == result
    assert document["learning_rate"] == {"rule": "sqrt", "from": 0.1, "to": 0.14}
    assert next(iter(document)) == "version"


def test_a_finished_result_follows_the_schema_and_comes_back():
    result = dataclasses.replace(build_finished(), verification=build_verification())
    document = json.loads(result.to_json_text())
    jsonschema.validate(document, read_schema())
    assert TuneResult.read(document) == result
    assert [probe["kind"] for probe in document["probes"]] == ["device", "memory"]
    assert document["savings"]["verdict"] == "faster"
    assert document["advice"]["roof"]["mfu_pct"] == pytest.approx(18.0)
    assert document["picks"]["memory"]["id"] == document["picks"]["recommended"]["id"]


def test_every_null_of_the_new_parts_has_its_reason():
    document = build_finished(machine=MACHINE, workload={"name": "tiny"}).to_document()
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
        lambda d: d["trials"][2].update(reason=None),
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
    result = dataclasses.replace(build_finished(), verification=build_verification())
    document = json.loads(result.to_json_text())
    damage(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, read_schema())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: d.pop("picks"), "TuneResult.picks is missing"),
        (lambda d: d["trials"][0].update(samples_per_s="fast"), r"samples_per_s is 'fast' \(str\), expected float"),
    ],
)
def test_a_damaged_document_is_refused_by_the_key_that_is_missing_or_wrong(damage, said):
    document = json.loads(build_result().to_json_text())
    damage(document)
    with pytest.raises(ValueError, match=said):
        TuneResult.read(document)


def test_a_pick_is_a_whole_row_of_the_table():
    document = build_result().to_document()
    rows = {row["id"]: row for row in document["trials"]}
    assert set(document["picks"]) == {"throughput", "efficiency", "recommended", "memory"}
    for made in document["picks"].values():
        row = rows[made["id"]]
        assert {key: made[key] for key in row} == row
        assert {"rule", "tied_with", "changes"} <= made.keys()


def test_an_epoch_is_samples_over_throughput_with_the_interval_turned_round():
    row = SimulatedTarget(lambda plan: Answer(samples_per_s=200.0, spread_pct=10.0))(USER, id="t1", why="")
    epoch = build_epoch_seconds(row, 1000)
    assert epoch.estimate == 5.0
    assert epoch.ci95 == pytest.approx((1000 / 220, 1000 / 180))
    assert build_epoch_seconds(row, None) == EpochSeconds(estimate=None, ci95=None)


def make_runs(*rates, first=1, comparison=None, **levers):
    """Runs of the user's plan side by side with others, numbered in their order."""
    plan = USER.replace(**levers)
    rows = [
        SimulatedTarget(lambda _, rate=rate: Answer(samples_per_s=rate, spread_pct=1.0))(
            plan, id=f"t{first + i}", why=""
        )
        for i, rate in enumerate(rates)
    ]
    return [dataclasses.replace(row, kind="repeat", comparison=comparison) for row in rows]


def test_an_epochs_interval_holds_what_differs_between_processes():
    runs = make_runs(200.0, 230.0, 180.0)
    alone, together = (build_epoch_seconds(runs[0], 1000, runs=given) for given in ((), runs))
    assert alone.estimate == 5.0
    assert together.estimate == pytest.approx(1000 / (200 * 230 * 180) ** (1 / 3)), "the base of what is saved"
    assert alone.ci95 == pytest.approx((1000 / 202, 1000 / 198))
    assert together.ci95[0] < 1000 / 230
    assert together.ci95[1] > 1000 / 180


def test_an_epochs_interval_is_of_the_newest_comparison_alone():
    """A search that was started again the day after once widened it by the runs of a slower day."""
    old = make_runs(50.0, 60.0, comparison="yesterday")
    new = make_runs(200.0, 201.0, 199.0, first=5, comparison="today")
    others = make_runs(400.0, 410.0, first=9, comparison="today", batch_size=64)
    epoch = build_epoch_seconds(new[0], 1000, runs=[*old, *new, *others])
    assert epoch == build_epoch_seconds(new[0], 1000, runs=new)
    assert epoch.ci95[1] < 1000 / 190


def test_an_epoch_of_a_row_without_an_interval_has_none():
    row = SimulatedTarget(lambda plan: Answer(samples_per_s=200.0))(USER, id="t1", why="")
    blind = dataclasses.replace(row, samples_per_s_ci95=None)
    assert build_epoch_seconds(blind, 1000, runs=[blind]) == EpochSeconds(estimate=5.0, ci95=None)


def test_a_search_has_paid_for_itself_when_all_its_runs_are_paid():
    """Rows found in the folder cost this command nothing; they did cost time."""
    search = dataclasses.replace(build_result().search, seconds=7.0, earlier_s=30.0)
    assert build_finished(search=search).savings.search_s == 37.0
