"""The gates: errors in decibels, a metric's loss with its interval, and settings that silently do nothing."""

import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fulltilt.infer.gates.accuracy import (
    EQUAL_DB,
    compare_outputs,
    compute_changed_labels_pct,
    compute_metric_drop,
    judge_accuracy,
)
from fulltilt.infer.gates.effect import Effect, judge_effect, judge_speed
from fulltilt.infer.gates.turns import measure_speed_up
from fulltilt.infer.manifest import Accuracy
from fulltilt.levers import Facts
from fulltilt.levers.compile import CompiledGraphs

CPU = Facts(device_type="cpu", has_native_bf16=False)
GPU = Facts(device_type="cuda", has_native_bf16=True)
PLAN = {"engine": "eager", "quantization": "none", "attention": "auto", "cuda_graphs": False, "precision": "fp32"}
WORKS = Effect(
    observed={}, operators=("aten::addmm",), n_builds=0, n_graph_runs=None, speed_up=2.0, speed_up_ci=(1.9, 2.1)
)
LIMITS = {"min_sqnr_db": 25.0, "max_metric_drop_pct": 1.0}


def see(**changes):
    import dataclasses

    return dataclasses.replace(WORKS, **changes)


def test_the_error_is_told_in_decibels_of_the_worst_output():
    rng = np.random.default_rng(0)
    reference = [(rng.normal(size=5), rng.normal(size=(2, 3))) for _ in range(50)]
    assert compare_outputs(reference, reference) == (EQUAL_DB, 0.0)
    here = [(a, b * 1.01) for a, b in reference]
    sqnr_db, largest = compare_outputs(reference, here)
    assert sqnr_db == pytest.approx(40)
    assert largest == pytest.approx(max(np.abs(b).max() for _, b in reference) / 100)
    for wrong in (np.full(5, math.nan), rng.normal(size=4)):
        assert compare_outputs(reference, [(wrong, b) for _, b in reference])[0] == -math.inf


def test_labels_count_where_another_class_has_the_largest_score():
    scores = [(np.array([0.0, 1.0]),), (np.array([2.0, 1.0]),)]
    assert compute_changed_labels_pct(scores, [scores[0], (np.array([1.0, 1.1]),)]) == 50
    assert compute_changed_labels_pct([(np.ones((2, 3)),)], [(np.ones((2, 3)),)]) is None


@pytest.mark.parametrize(("name", "sign"), [("accuracy", 1), ("squared_error", -1)])
def test_a_metric_loses_in_the_direction_it_points(name, sign):
    fp32 = np.tile([0.9, 0.9, 0.9, 0.5], 100)
    here = fp32 - sign * np.tile([0.1, 0, 0, 0], 100)
    _, _, (low, high) = compute_metric_drop(name, fp32, here)
    assert 0.015 < low < 0.025 < high < 0.035
    _, _, (_, gain) = compute_metric_drop(name, here, fp32)
    assert gain < 0
    _, _, either = compute_metric_drop("style", here, fp32)
    assert either[1] > 0.025, "of a metric that points nowhere any change is a loss"


def test_accuracy_is_judged_by_the_whole_interval():
    good = Accuracy(
        sqnr_db=30, max_abs_error=0.1, n_samples=400, metric="accuracy", metric_fp32=0.9, metric_here=0.9,
        metric_drop_ci95=(-0.001, 0.008),
    )  # fmt: skip
    assert judge_accuracy(good, **LIMITS) == []
    (loud,) = judge_accuracy(Accuracy(sqnr_db=24.9, max_abs_error=1, n_samples=4), **LIMITS)
    assert "24.9 dB" in loud
    import dataclasses

    (lost,) = judge_accuracy(dataclasses.replace(good, metric_drop_ci95=(-0.001, 0.0091)), **LIMITS)
    assert "accuracy loses -0.001 to 0.0091 of 0.9, inference.max_metric_drop_pct 1 allows 0.009" in lost


def test_what_works_passes_and_eager_fp32_needs_no_gain():
    assert judge_effect({**PLAN, "engine": "compile"}, see(n_graph_runs=3), CPU) == []
    assert judge_effect(PLAN, see(speed_up=1.0, speed_up_ci=(0.98, 1.02)), CPU) == []
    (failure,) = judge_effect({**PLAN, "threads": 1}, see(observed={"threads": 2}), CPU)
    assert failure == "effect: threads 1 is not in force, 2 is"


# Six settings that did nothing, each seen in a released library.


def test_no_op_1_torchaos_dynamic_int8_in_eager_mode_is_slower_than_fp32():
    """pytorch/ao#3157, #4365: 15 times slower than fp32 on AVX2."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(512, 512)).eval()
    quantized = nn.Sequential(nn.Linear(512, 512)).eval()
    quantized.load_state_dict(layer.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(quantized, quantization.Int8DynamicActivationInt8WeightConfig())

    def call(model):
        def run(inputs):
            with torch.no_grad():
                return (model(torch.from_numpy(inputs[0])).numpy(),)

        return run

    batches = [(np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32),)]
    speed_up, *interval = measure_speed_up(call(layer), call(quantized), batches, limit_s=0.5)
    if speed_up > 1:
        pytest.skip(f"this machine's int8 is {speed_up:.1f} times as fast")
    (failure,) = judge_effect(
        {**PLAN, "quantization": "int8"},
        see(operators=("quantized::linear_dynamic",), speed_up=speed_up, speed_up_ci=tuple(interval)),
        CPU,
    )
    assert "eager fp32 in turns" in failure


def test_no_op_2_int8_that_computes_in_fp32_is_seen_by_its_operators():
    """pytorch/ao#4566: a package of AOTInductor with int8 weights whose products were all fp32."""
    products = ("aoti_torch_cpu_mkl_linear", "aten::addmm", "aten::mm")
    plan = {**PLAN, "engine": "aot", "quantization": "int8_weights"}
    (failure,) = judge_effect(plan, see(operators=products), CPU)
    assert "quantization int8_weights did not run" in failure
    assert "products were aten::addmm, aten::mm" in failure or "aoti_torch_cpu_mkl_linear" in failure


def test_no_op_3_a_compiled_model_that_calls_go_around_ran_no_graph():
    """huggingface/sentence-transformers#3791: ``compile()`` compiled ``__call__``, and ``encode`` went to forward."""
    model, graphs = nn.Linear(4, 2), CompiledGraphs()
    model.compile(backend=graphs)

    def encode(inputs):
        return model.forward(inputs)

    encode(torch.zeros(3, 4))
    failures = judge_effect({**PLAN, "engine": "compile"}, see(n_graph_runs=graphs.n_runs), CPU)
    assert failures == ["effect: no compiled graph ran: calls go around it, in eager mode"]


def test_no_op_4_bf16_without_the_instructions_is_emulated():
    plan = {**PLAN, "precision": "bf16"}
    assert judge_effect(plan, WORKS, CPU) == ["effect: bf16 is emulated: this CPU has no bf16 arithmetic"]
    assert judge_effect(plan, WORKS, GPU) == []


def test_no_op_5_an_option_that_nothing_reads_has_no_gain():
    """Lightning-AI/LitServe#751: ``fast_queue=True`` went to a keyword that nobody had."""
    now_s = 0.0

    def serve(*, fast_queue=False, **_):
        del fast_queue  # as there

        def answer(inputs):
            nonlocal now_s
            now_s += 1 + 0.02 * math.sin(1e6 * now_s)
            return inputs

        return answer

    found = measure_speed_up(serve(), serve(fast_queue=True), [()], limit_s=0, clock=lambda: now_s)
    (failure,) = judge_effect({**PLAN, "engine": "onnx"}, see(speed_up=found[0], speed_up_ci=found[1:]), CPU)
    assert "faster than eager fp32" in failure


def test_no_op_6_graphs_that_are_recorded_at_every_shape_are_counted():
    """pytorch/pytorch#188150: CUDA graphs recorded anew where padding is dynamic."""
    plan = {**PLAN, "engine": "compile", "cuda_graphs": True}
    (failure,) = judge_effect(plan, see(n_builds=7, n_graph_runs=9), GPU)
    assert "7 graphs were compiled or recorded anew within the declared shapes" in failure


def test_a_gain_is_measured_in_turns_and_an_equal_arm_has_none():
    now_s, draws = 0.0, np.random.default_rng(3)

    def take(seconds):
        def answer(inputs):
            nonlocal now_s
            now_s += seconds * (1 + now_s / 200) * draws.uniform(0.95, 1.05)  # the machine gets slower all the time
            return inputs

        return answer

    clock = lambda: now_s  # noqa: E731
    middle, low, high = measure_speed_up(take(0.2), take(0.1), [(), ()], limit_s=0, clock=clock)
    assert low < 2 < high
    assert high - low < 0.3
    assert middle == pytest.approx(2, rel=0.1)
    _, low, high = measure_speed_up(take(0.1), take(0.1), [(), ()], limit_s=0, clock=clock)
    assert judge_speed((low, high))
