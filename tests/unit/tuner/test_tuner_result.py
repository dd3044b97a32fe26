"""The JSON document: its schema, its way back, and a reason for every null."""

from __future__ import annotations

import copy
import dataclasses
import json

import jsonschema
import pytest

from fulltilt.levers import default_plan
from fulltilt.records import Machine
from fulltilt.tuner import recommend
from fulltilt.tuner.hints import find_hints
from fulltilt.tuner.recommend import LearningRate
from fulltilt.tuner.result import EpochSeconds, SearchSummary, TuneResult, build_epoch_seconds, read_schema
from fulltilt.tuner.simulated import Answer, SimulatedTarget

USER = default_plan({"batch_size": 32})
MACHINE = Machine(
    hostname_hash="0" * 12, system="Linux", is_wsl=False, cpu_model="cpu", n_cores_physical=2, n_cores_logical=2,
    n_cores_usable=2, memory_total_bytes=1, memory_available_bytes=1, memory_limit_bytes=None, shm_total_bytes=None,
    devices=(), python="3.11", packages={},
)  # fmt: skip


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


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("picks"),
        lambda d: d["trials"][0].pop("samples_per_s"),
        lambda d: d["trials"][0].update(samples_per_s=None),
        lambda d: d["trials"][2].update(reason=None),
        lambda d: d["trials"][0].update(status="fine"),
        lambda d: d["trials"][0]["plan"].update(precision="auto"),
        lambda d: d["picks"]["recommended"].update(status="error"),
        lambda d: d["picks"]["recommended"].pop("changes"),
        lambda d: d["search"].update(n_trials=-1),
    ],
)
def test_the_schema_refuses_a_document_that_breaks_the_contract(damage):
    document = json.loads(build_result().to_json_text())
    broken = copy.deepcopy(document)
    damage(broken)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, read_schema())


def test_a_pick_is_a_whole_row_of_the_table():
    document = build_result().to_document()
    rows = {row["id"]: row for row in document["trials"]}
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
