"""Guards, candidates, notes and the precision that ``auto`` becomes: pure functions of facts, torch-free."""

import typing

import annotated_types
import pytest

from fulltilt.config import Interval, config_from_values, parse_interval
from fulltilt.errors import ConfigError
from fulltilt.levers import Facts, default_plan, find_notes, find_obstacles, load_catalogue, read_interval
from fulltilt.levers.precision import resolve
from fulltilt.tuner.question.space import build_space

CPU = Facts(device_type="cpu", n_cores_usable=4)
TURING = Facts(device_type="cuda", compute_capability=(7, 5), n_cores_usable=8)
AMPERE = Facts(device_type="cuda", compute_capability=(8, 6), n_cores_usable=8)


def with_facts(base: Facts, **facts) -> Facts:
    return Facts(**{name: getattr(base, name) for name in Facts.__dataclass_fields__} | facts)


@pytest.mark.parametrize(
    ("change", "facts", "word"),
    [
        ({"batch_size": 400}, with_facts(CPU, n_samples=360), "use batch_size 360 or less"),
        ({"batch_size": 100, "accumulate": 4}, with_facts(CPU, n_samples=360), "use accumulate 3 or less"),
        ({"pin_memory": True}, CPU, "no accelerator"),
        ({"persistent_workers": True}, CPU, "set num_workers to 1"),
        ({"prefetch_factor": 4}, CPU, "set num_workers to 1"),
        ({"worker_threads": 2}, CPU, "no data workers"),
        ({"num_workers": 2}, with_facts(CPU, is_iterable=True), "once per worker"),
        ({"cudnn_benchmark": True}, CPU, "CUDA devices only"),
        ({"cudnn_benchmark": True}, with_facts(AMPERE, has_conv=False, has_any_conv=False), "no convolution"),
        ({"channels_last": True}, with_facts(AMPERE, has_conv=False), "no 2-d convolution"),
        ({"precision": "tf32"}, CPU, "compute capability 8.0"),
        ({"precision": "tf32"}, TURING, "this device has 7.5; use fp16"),
        ({"precision": "bf16"}, TURING, "this device has 7.5; use fp16"),
        ({"precision": "bf16"}, with_facts(TURING, compute_capability=(6, 1)), "use fp32"),
        ({"precision": "auto"}, CPU, "valid: fp32, tf32, bf16, fp16"),
        ({"compile": True}, with_facts(CPU, has_c_compiler=False), "install g++"),
        ({"fused_optimizer": True}, with_facts(CPU, optimizer="RMSprop"), "RMSprop has no fused step (it exists"),
        ({"fused_optimizer": True}, with_facts(AMPERE, optimizer="Adagrad"), "no fused step on cuda"),
        ({"activation_checkpointing": True}, with_facts(CPU, n_checkpointable=0), "no repeated blocks"),
        ({"compile": "regional"}, with_facts(CPU, n_checkpointable=0), "no repeated blocks to compile"),
        ({"deterministic": True, "compile": "max-autotune"}, CPU, "picked by timing"),
        ({"deterministic": True, "cudnn_benchmark": True}, AMPERE, "from run to run"),
        ({"expandable_segments": True}, CPU, "CUDA allocator"),
        ({"retain_freed_memory": True}, AMPERE, "in the device's memory"),
        ({"empty_cache_every": "5 epochs"}, CPU, "CUDA allocator"),
    ],
)
def test_values_that_cannot_apply_say_why(change, facts, word):
    reasons = find_obstacles(default_plan(change), facts)
    assert len(reasons) == 1
    assert word in reasons[0]
    assert reasons[0].startswith(f"{list(change)[-1]}=")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"batch_size": 360}, with_facts(CPU, n_samples=360)),
        ({"batch_size": 90, "accumulate": 4}, with_facts(CPU, n_samples=360)),
        ({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4, "worker_threads": 2}, CPU),
        ({"precision": "bf16"}, CPU),
        ({"precision": "fp16"}, CPU),
        ({"precision": "fp16"}, TURING),
        ({"precision": "tf32", "cudnn_benchmark": True, "pin_memory": True, "channels_last": True}, AMPERE),
        ({"cudnn_benchmark": True}, with_facts(AMPERE, has_conv=False, has_any_conv=True)),
        ({"fused_optimizer": True}, with_facts(CPU, optimizer="Adagrad")),
        ({"fused_optimizer": True, "compile": True, "activation_checkpointing": True}, CPU),
    ],
)
def test_values_that_apply_or_are_not_known_yet_pass(change, facts):
    assert find_obstacles(default_plan(change), facts) == []


@pytest.mark.parametrize(
    ("facts", "precision", "has_note"),
    [
        (with_facts(CPU, has_native_bf16=True), "bf16", False),
        (with_facts(CPU, has_native_bf16=False), "fp32", True),
        (CPU, "fp32", True),
        (AMPERE, "bf16", False),
        (TURING, "fp16", False),
        (with_facts(TURING, compute_capability=(6, 1)), "fp32", True),
    ],
)
def test_auto_precision_is_the_mixed_precision_of_the_hardware(facts, precision, has_note):
    value, note = resolve("auto", facts)
    assert value == precision
    assert (note is not None) is has_note
    assert resolve(precision, facts) == (precision, None), "a named one is left alone"
    assert find_obstacles(default_plan({"precision": value}), facts) == []


@pytest.mark.parametrize("facts", [CPU, TURING, AMPERE, with_facts(CPU, n_samples=5, n_checkpointable=0)])
@pytest.mark.parametrize("name", load_catalogue())
def test_candidates_apply_where_they_are_proposed(name, facts):
    lever = load_catalogue()[name]
    values = lever.candidates(facts)
    assert len(values) == len(set(values)) > 0
    base = {"num_workers": 1, "batch_size": 1}
    for value in values:
        if name != "accumulate":
            assert find_obstacles(default_plan(base | {name: value}), facts) == []
        lever.complexity(value)


def test_wsl_and_emulation_are_noted():
    assert "WSL2" in find_notes(default_plan({"pin_memory": True}), with_facts(AMPERE, is_wsl=True))[0]
    assert "emulated" in find_notes(default_plan({"precision": "bf16"}), with_facts(CPU, has_native_bf16=False))[0]
    assert "4 usable cores" in find_notes(default_plan({"threads": 9}), CPU)[0]
    assert "#192330" in find_notes(default_plan({"expandable_segments": True}), with_facts(AMPERE, is_wsl=True))[0]
    assert "does not prevent" in find_notes(default_plan({"empty_cache_every": "5 epochs"}), AMPERE)[0]
    assert find_notes(default_plan(), AMPERE) == []


USE_AMP = {True: "auto", False: "fp32", "bf16": "bf16", "16-mixed": "fp16", "bfloat16": "bf16", "no": "fp32"}
EMPTY_CACHE_FREQ = {5: "5 epochs", 0: None, "100 steps": "100 steps", None: None}


@pytest.mark.parametrize(
    ("name", "alias", "spellings"),
    [("precision", "use_amp", USE_AMP), ("empty_cache_every", "empty_cache_freq", EMPTY_CACHE_FREQ)],
)
def test_spellings_of_others_are_read(name, alias, spellings):
    parse = load_catalogue()[name].parse_alias
    assert {value: parse(alias, value) for value in spellings} == spellings
    assert load_catalogue()["empty_cache_every"].parse_alias("empty_cache_freq", False) is None


def test_the_gpu_section_of_guide_002_takes_effect():
    config = config_from_values({"gpu": {"empty_cache_freq": 5, "cudnn_benchmark": True}}, base_dir=".")
    assert config.speed.empty_cache_every == "5 epochs"
    assert config.speed.cudnn_benchmark is True


@pytest.mark.parametrize("text", ["5", "0 steps", "5 lightyears", "-1 epoch", "1.5 epochs"])
def test_an_interval_that_is_none_is_refused_with_its_form(text):
    with pytest.raises(ConfigError, match=r"expected text like '5 epochs' or '100 steps' or null"):
        config_from_values({"speed": {"empty_cache_every": text}}, base_dir=".")


@pytest.mark.parametrize("text", ["5 epochs", "5 Epochs", "1_000 steps", "100steps", " 1 step "])
def test_a_lever_and_the_other_settings_take_one_spelling_of_an_interval(text):
    """the lever had a stricter reader of its own"""
    values = {"speed": {"empty_cache_every": text}, "run": {"evaluate_every": text}}
    config = config_from_values(values, base_dir=".")
    count, unit = read_interval(config.speed.empty_cache_every)
    assert parse_interval(config.run.evaluate_every) == Interval(count=count, unit=f"{unit}s")


def test_levers_that_buy_no_speed_are_never_tried_unasked():
    space = build_space(
        config_from_values({"run": {"deterministic": True}}, base_dir="."), with_facts(AMPERE), all_levers=True
    )
    assert {"deterministic", "expandable_segments", "empty_cache_every"}.isdisjoint(space.axes)
    assert space.user_plan["deterministic"] is True


def test_every_lever_is_documented_and_its_default_is_a_default_plan():
    for lever in load_catalogue().values():
        assert len(lever.doc) > 80
        assert lever.summary.endswith(".")
        assert lever.key.split(".")[0] in ("data", "speed", "run")
        assert lever.key.split(".")[1] == lever.name
    assert find_obstacles(default_plan(), CPU) == []
    assert find_obstacles(default_plan(), AMPERE) == []


@pytest.mark.parametrize(
    ("name", "least"),
    [("batch_size", 1), ("num_workers", 0), ("accumulate", 1), ("prefetch_factor", 1), ("threads", 1)],
)
def test_whole_numbers_carry_their_bound(name, least):
    hint = load_catalogue()[name].type
    hints = [hint, *typing.get_args(hint)]
    bounds = [m for h in hints for m in getattr(h, "__metadata__", ())]
    assert annotated_types.Ge(least) in bounds
