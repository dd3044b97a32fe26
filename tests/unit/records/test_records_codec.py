import dataclasses
import math
import os
import pickle
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulltilt.records import (
    Measurement,
    PhasesMs,
    Plan,
    Trial,
    TrialRequest,
    WorkloadSource,
    decode,
    dumps,
    encode,
    loads,
)
from fulltilt.tuner.answer.picks import Pick

PLAN = Plan(batch_size=64, accumulate=2, num_workers=0, precision="bf16", pin_memory=False, threads=None)
PHASES = PhasesMs(data_wait=0.5, h2d=None, forward=2.0, backward=4.0, optimizer=0.25, other=0.25, step=7.0)


def build_trial(**changes):
    values = {
        "id": "t3", "plan": PLAN, "status": "ok", "effective_batch_size": 128, "batch_size_per_device": 64,
        "phases_ms": PHASES, "samples_per_s": 18285.7, "samples_per_s_ci95": (18000.0, 18500.0),
        "null_reasons": {"h2d": "no copy to a device on the CPU"},
    }  # fmt: skip
    return Trial(**values | changes)


@pytest.mark.parametrize(
    "record",
    [
        build_trial(),
        build_trial(status="out_of_memory", phases_ms=None, samples_per_s=None, samples_per_s_ci95=None),
        TrialRequest(
            id="t1", source=WorkloadSource(config={"task": "a:b"}, base_dir="."), plan=PLAN, device="cpu", n_steps=10
        ),
        Measurement(
            phases_ms=PHASES, samples_per_s=1.0, samples_per_s_ci95=(0.5, 1.5), block_samples_per_s=(1.0, 1.1),
            n_steps=16, n_warmup_steps=8, observed={"num_workers": 0},
        ),
    ],
    ids=lambda record: type(record).__name__,
)  # fmt: skip
def test_a_record_survives_the_codec(record):
    assert loads(type(record), dumps(record)) == record


def test_keys_that_join_later_are_ignored():
    data = dataclasses.asdict(build_trial(phases_ms=None)) | {"plan": PLAN.to_json(), "joined_later": 1}
    assert decode(Trial, data).id == "t3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"plan": None}, "Trial.plan is missing"),
        ({"status": "fine"}, "Trial.status is 'fine', expected one of 'ok', 'out_of_memory'"),
        ({"id": 3}, "Trial.id is 3 (int), expected str"),
        ({"phases_ms": {"forward": 1.0}}, "Trial.phases_ms.data_wait is missing"),
        ({"samples_per_s_ci95": 5}, "Trial.samples_per_s_ci95 is 5 (int), expected a list"),
        ({"null_reasons": [1]}, "Trial.null_reasons is [1] (list), expected an object"),
        ({"plan": 5}, "Trial.plan: "),
    ],
)
def test_a_wrong_value_is_named(change, said):
    data = {"id": "t1", "plan": {}, "status": "ok"} | change
    with pytest.raises(ValueError, match=re.escape(said)):
        decode(Trial, {key: value for key, value in data.items() if value is not None})


@pytest.mark.parametrize("name", ["tied_with", "changes", "proven", "gain"])
def test_a_pick_without_a_key_is_told_by_it(name):
    data = encode(Pick(trial=build_trial(), rule="fastest"))
    with pytest.raises(ValueError, match=rf"^Pick\.{name} is missing$"):
        decode(Pick, {key: value for key, value in data.items() if key != name})


def test_no_file_ever_holds_a_non_finite_number():
    assert dumps({"a": math.nan, "b": [math.inf, 1.0]}) == '{"a": null, "b": [null, 1.0]}'


def test_what_has_no_json_form_is_refused():
    with pytest.raises(TypeError, match="complex has no JSON form"):
        dumps({"a": 1j})


@given(st.dictionaries(st.text(min_size=1), st.none() | st.booleans() | st.integers() | st.text()))
def test_plans_do_not_depend_on_the_order_of_their_levers(values):
    forwards, backwards = Plan(values), Plan(dict(reversed(values.items())))
    assert forwards == backwards
    assert hash(forwards) == hash(backwards)
    assert forwards.digest == backwards.digest
    assert loads(Plan, dumps(forwards)) == forwards


def test_a_plan_of_another_process_is_found_among_those_of_this_one():
    """Texts hash in another way there: no grid held the plans of a pool's process."""
    build = (
        "import pickle, sys; from fulltilt.records import Plan; sys.stdout.buffer.write(pickle.dumps(Plan(threads=2)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", build], env=os.environ | {"PYTHONHASHSEED": "1"}, stdout=subprocess.PIPE, check=True
    )
    assert pickle.loads(done.stdout) in {Plan(threads=2)}


def test_replacing_leaves_the_plan_alone():
    assert PLAN.replace(accumulate=4).effective_batch_size == 256
    assert PLAN.effective_batch_size == 128
