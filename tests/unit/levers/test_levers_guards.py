"""Guards, candidates, notes and the precision that ``auto`` becomes: pure functions of facts, torch-free."""

from dataclasses import replace

import pytest

from fulltilt.config import Interval, config_from_values, parse_interval
from fulltilt.errors import ConfigError
from fulltilt.levers import Facts, default_plan, find_notes, find_obstacles, load_catalogue, read_interval
from fulltilt.levers.precision import resolve
from fulltilt.tuner.question.space import build_space

CPU = Facts(device_type="cpu", n_cores_usable=4)
TURING = Facts(device_type="cuda", compute_capability=(7, 5), n_cores_usable=8)
AMPERE = Facts(device_type="cuda", compute_capability=(8, 6), n_cores_usable=8)


@pytest.mark.parametrize(
    ("change", "facts", "word"),
    [
        ({"batch_size": 400}, replace(CPU, n_samples=360), "use batch_size 360 or less"),
        ({"batch_size": 100, "accumulate": 4}, replace(CPU, n_samples=360), "use accumulate 3 or less"),
        ({"pin_memory": True}, CPU, "no accelerator"),
        ({"persistent_workers": True}, CPU, "set num_workers to 1"),
        ({"num_workers": 1, "persistent_workers": True}, replace(CPU, is_iterable=True), "use false"),
        ({"prefetch_factor": 4}, CPU, "set num_workers to 1"),
        ({"worker_threads": 2}, CPU, "no data workers"),
        ({"num_workers": 2}, replace(CPU, is_iterable=True), "once per worker"),
        ({"cudnn_benchmark": True}, CPU, "CUDA devices only"),
        ({"cudnn_benchmark": True}, replace(AMPERE, has_conv=False, has_any_conv=False), "no convolution"),
        ({"channels_last": True}, replace(AMPERE, has_conv=False), "no 2-d convolution"),
        ({"precision": "tf32"}, CPU, "compute capability 8.0"),
        ({"precision": "tf32"}, TURING, "this device has 7.5; use fp16"),
        ({"precision": "bf16"}, TURING, "this device has 7.5; use fp16"),
        ({"precision": "bf16"}, replace(TURING, compute_capability=(6, 1)), "use fp32"),
        ({"precision": "auto"}, CPU, "valid: fp32, tf32, bf16, fp16"),
        ({"compile": True}, replace(CPU, has_c_compiler=False), "install g++"),
        ({"fused_optimizer": True}, replace(CPU, optimizer="RMSprop"), "RMSprop has no fused step (it exists"),
        ({"fused_optimizer": True}, replace(AMPERE, optimizer="Adagrad"), "no fused step on cuda"),
        ({"activation_checkpointing": True}, replace(CPU, n_checkpointable=0), "no repeated blocks"),
        ({"compile": "regional"}, replace(CPU, n_checkpointable=0), "no repeated blocks to compile"),
        ({"deterministic": True, "compile": "max-autotune"}, CPU, "picked by timing"),
        ({"compile": "reduce-overhead"}, CPU, "NVIDIA GPUs only; use compile true"),
        ({"accumulate": 2, "compile": "reduce-overhead"}, AMPERE, "use accumulate 1, or compile true"),
        ({"compile": "reduce-overhead"}, replace(AMPERE, n_ranks=2), "use one device, or compile true"),
        ({"deterministic": True, "cudnn_benchmark": True}, AMPERE, "from run to run"),
        ({"expandable_segments": True}, CPU, "CUDA allocator"),
        ({"retain_freed_memory": True}, AMPERE, "in the device's memory"),
        ({"wait_policy": "passive"}, AMPERE, "operators on the CPU"),
        ({"thread_affinity": True}, AMPERE, "operators on the CPU"),
        ({"threads": 1, "wait_policy": "active"}, CPU, "one thread"),
        ({"empty_cache_every": "5 epochs"}, CPU, "CUDA allocator"),
        ({"device_prefetch": True}, CPU, "no device to copy"),
        ({"threads": 4097}, CPU, "threads=4097: at most 4,096"),  # more would end the process
        ({"num_workers": 8193}, CPU, "num_workers=8193: at most 8,192"),
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
        ({}, CPU),
        ({}, AMPERE),
        ({"batch_size": 360}, replace(CPU, n_samples=360)),
        ({"batch_size": 90, "accumulate": 4}, replace(CPU, n_samples=360)),
        ({"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4, "worker_threads": 2}, CPU),
        ({"threads": 4096, "num_workers": 8192, "precision": "bf16"}, CPU),
        ({"precision": "fp16"}, CPU),
        ({"precision": "fp16"}, TURING),
        ({"precision": "tf32", "cudnn_benchmark": True, "pin_memory": True, "channels_last": True}, AMPERE),
        ({"cudnn_benchmark": True}, replace(AMPERE, has_conv=False, has_any_conv=True)),
        ({"fused_optimizer": True}, replace(CPU, optimizer="Adagrad")),
        ({"compile": "reduce-overhead", "precision": "fp16"}, AMPERE),
        ({"fused_optimizer": True, "compile": True, "activation_checkpointing": True}, CPU),
    ],
)
def test_values_that_apply_or_are_not_known_yet_pass(change, facts):
    assert find_obstacles(default_plan(change), facts) == []


@pytest.mark.parametrize(
    ("facts", "precision", "has_note"),
    [
        (replace(CPU, has_native_bf16=True), "bf16", False),
        (replace(CPU, has_native_bf16=False), "fp32", True),
        (CPU, "fp32", True),
        (AMPERE, "bf16", False),
        (TURING, "fp16", False),
        (replace(TURING, compute_capability=(6, 1)), "fp32", True),
    ],
)
def test_auto_precision_is_the_mixed_precision_of_the_hardware(facts, precision, has_note):
    value, note = resolve("auto", facts)
    assert value == precision
    assert (note is not None) is has_note
    assert resolve(precision, facts) == (precision, None), "a named one is left alone"
    assert find_obstacles(default_plan({"precision": value}), facts) == []


@pytest.mark.parametrize("facts", [CPU, TURING, AMPERE, replace(CPU, n_samples=5, n_checkpointable=0)])
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
    assert "WSL2" in find_notes(default_plan({"pin_memory": True}), replace(AMPERE, is_wsl=True))[0]
    assert "emulated" in find_notes(default_plan({"precision": "bf16"}), replace(CPU, has_native_bf16=False))[0]
    assert "4 usable cores" in find_notes(default_plan({"threads": 9}), CPU)[0]
    assert "#192330" in find_notes(default_plan({"expandable_segments": True}), replace(AMPERE, is_wsl=True))[0]
    assert "does not prevent" in find_notes(default_plan({"empty_cache_every": "5 epochs"}), AMPERE)[0]
    assert find_notes(default_plan(), AMPERE) == []


@pytest.mark.parametrize(
    ("facts", "values"),
    [
        (CPU, (False,)),
        (AMPERE, (False, True, "reduce-overhead")),
        (replace(AMPERE, n_ranks=2), (False, True)),
        (replace(AMPERE, has_c_compiler=False), (False,)),
    ],
)
def test_compile_is_tried_with_cuda_graphs_where_there_can_be_some(facts, values):
    assert load_catalogue()["compile"].candidates(facts) == values


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


@pytest.mark.parametrize("text", ["5", "0 steps", "5 lightyears"])
def test_an_interval_that_is_none_is_refused_with_its_form(text):
    with pytest.raises(ConfigError, match=r"expected text like '5 epochs' or '100 steps' or null"):
        config_from_values({"speed": {"empty_cache_every": text}}, base_dir=".")


@pytest.mark.parametrize("text", ["5 epochs", "5 Epochs", "1_000 steps", "100steps", " 1 step "])
def test_a_lever_and_the_other_settings_take_one_spelling_of_an_interval(text):
    values = {"speed": {"empty_cache_every": text}, "run": {"evaluate_every": text}}
    config = config_from_values(values, base_dir=".")
    count, unit = read_interval(config.speed.empty_cache_every)
    assert parse_interval(config.run.evaluate_every) == Interval(count=count, unit=f"{unit}s")


def test_levers_that_buy_no_speed_are_never_tried_unasked():
    space = build_space(config_from_values({"run": {"deterministic": True}}, base_dir="."), AMPERE, all_levers=True)
    assert {"deterministic", "expandable_segments", "empty_cache_every"}.isdisjoint(space.axes)
    assert space.user_plan["deterministic"] is True


def test_every_lever_is_documented_and_has_a_key_of_its_name():
    for lever in load_catalogue().values():
        assert len(lever.doc) > 80
        assert lever.summary.endswith(".")
        assert lever.key in (f"{section}.{lever.name}" for section in ("data", "speed", "run"))
