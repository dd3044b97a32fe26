"""Config as a value: round trips, digest, plans, schema, cost of loading."""

import copy
import functools
import json
import pickle
import subprocess
import sys

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.config.strategies import FOLDER_NAMES

from fulltilt.config import Config, config_from_values, load_config, plan_of, schema
from fulltilt.config.leaves import LEAVES
from fulltilt.config.loading import nest
from fulltilt.errors import ConfigError
from fulltilt.levers import load_catalogue
from fulltilt.records import Plan

CHOICES = {
    "task": st.sampled_from(["classification", "my_module:workload"]),
    "model": st.none() | st.sampled_from(["resnet18", "wideresnet(depth=28, width=2)", "timm:x(y=[1, 2])"]),
    "data.dataset": st.none() | st.sampled_from(["digits", "cifar10(root=data)"]),
    "data.path": st.none() | st.sampled_from(["/data/a b.h5", "é", "~"]),
    "data.transform.train": st.none() | st.sampled_from(["a | b(1)", "normalize"]),
    "data.batch_size": st.integers(1, 10**6),
    "data.num_workers": st.integers(0, 64),
    "data.placement": st.sampled_from(["stream", "ram", "auto"]),
    "data.prefetch_factor": st.none() | st.integers(1, 8),
    "optim.lr": st.floats(1e-12, 1e3),
    "optim.weight_decay": st.none() | st.floats(0, 1),
    "optim.warmup": st.sampled_from([0, 10, 0.05, "1 epoch", "20 steps"]),
    "speed.precision": st.sampled_from(["fp32", "tf32", "bf16", "fp16", "auto"]),
    "speed.compile": st.booleans(),
    "run.name": st.none() | FOLDER_NAMES,
    "run.device": st.sampled_from(["auto", "cpu", "cuda:1", 2, [0, 1]]),
    "run.checkpoint_every": st.none() | st.sampled_from(["1 epoch", "500 steps"]),
    "benchmark.batch_sizes": st.none() | st.lists(st.integers(1, 99), min_size=1, max_size=4),
    "benchmark.levers": st.sampled_from([None, {}, {"compile": [False, True]}, {"precision": ["fp32", "bf16"]}]),
    "targets.response_s": st.none() | st.dictionaries(st.sampled_from(["p50", "p99"]), st.floats(0.01, 9), min_size=1),
}


@functools.cache
def build_validator():
    return jsonschema.Draft202012Validator(schema())


@settings(max_examples=25)
@given(st.fixed_dictionaries({}, optional=CHOICES))
def test_values_read_back_equal(flat):
    config = config_from_values(nest(flat), base_dir="/somewhere")
    through_json = json.loads(json.dumps(config.to_values()))
    again = config_from_values(through_json, base_dir="/somewhere")
    assert again == config
    assert again.digest == config.digest
    assert hash(again) == hash(config)
    build_validator().validate(through_json)


def test_an_empty_set_of_values_is_every_default():
    config = config_from_values({}, base_dir="")
    assert config == Config()
    assert set(config.provenance.values()) == {"default"}
    assert plan_of(config) == Plan({name: lever.default for name, lever in load_catalogue().items()})


def test_digest_knows_the_values_and_nothing_else(write):
    file = write("lr: 0.01\nuse_amp: true\n", "a.yaml")
    a, b = load_config(file), load_config(write("# text\noptim: {lr: 1e-2}\nspeed: {precision: auto}\n"))
    assert a.digest == b.digest
    assert a == b
    assert load_config(file, ["lr=0.02"]).digest != a.digest
    assert a != config_from_values(a.to_values(), base_dir="/elsewhere")


def test_the_digest_is_the_same_in_another_process():
    code = "from fulltilt.config import config_from_values as c; print(c({'optim': {'lr': 0.5}}, base_dir='').digest)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert out == config_from_values({"optim": {"lr": 0.5}}, base_dir="").digest


def test_a_list_among_values_is_no_grid():
    with pytest.raises(ConfigError, match=r"lr \[0.1, 0.2\]: expected a number"):
        config_from_values({"optim": {"lr": [0.1, 0.2]}}, base_dir="")


def test_a_config_is_frozen_and_travels():
    config = config_from_values({"optim": {"lr": 0.5}}, base_dir="/d")
    with pytest.raises(ValueError, match="frozen"):
        config.optim.lr = 1.0  # type: ignore[misc]
    for copied in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert copied == config
        assert copied.base_dir == "/d"
        assert copied.provenance == config.provenance


def test_every_lever_has_its_key_and_its_default():
    for lever in load_catalogue().values():
        assert LEAVES[lever.key].default == lever.default
        assert LEAVES[lever.key].doc == lever.summary
