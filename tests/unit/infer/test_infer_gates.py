"""The gates: errors in decibels, a metric's loss with its interval, and settings that silently do nothing."""

import copy
import dataclasses
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

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
from fulltilt.infer.gates.effect import compare_speed, judge_effect
from fulltilt.infer.manifest import Accuracy
from fulltilt.levers import Facts
from fulltilt.levers.compile import CompiledGraphs
from fulltilt.records import decode
from fulltilt.stats import Comparison, compare_pairs

ROOT = Path(__file__).parents[3]
CPU = Facts(device_type="cpu", has_native_bf16=False)
GPU = Facts(device_type="cuda", has_native_bf16=True)
PLAN = {"engine": "eager", "quantization": "none", "attention": "auto", "cuda_graphs": False, "precision": "fp32"}
GAIN = compare_pairs([0.7, 0.71, 0.69] * 2)
LIMITS = {"min_sqnr_db": 25.0, "max_metric_drop_pct": 1.0}


def judge(facts=CPU, *, operators=("aten::addmm",), n_builds=0, n_graph_runs=None, gain=GAIN, **plan):
    seen = {"operators": operators, "n_builds": n_builds, "n_graph_runs": n_graph_runs, "gain": gain}
    return judge_effect({**PLAN, **plan}, facts, **seen)


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
    low, high = compute_metric_drop(name, fp32, here)["metric_drop_ci95"]
    assert 0.015 < low < 0.025 < high < 0.035
    _, gain = compute_metric_drop(name, here, fp32)["metric_drop_ci95"]
    assert gain < 0
    either = compute_metric_drop("style", here, fp32)["metric_drop_ci95"]
    assert either[1] > 0.025, "of a metric that points nowhere any change is a loss"


def test_accuracy_is_judged_by_the_whole_interval():
    good = Accuracy(
        sqnr_db=30, max_abs_error=0.1, n_samples=400, metric="accuracy", metric_fp32=0.9, metric_here=0.9,
        metric_drop_ci95=(-0.001, 0.008),
    )  # fmt: skip
    assert judge_accuracy(good, **LIMITS) == []
    (loud,) = judge_accuracy(Accuracy(sqnr_db=24.9, max_abs_error=1, n_samples=4), **LIMITS)
    assert "24.9 dB" in loud
    (lost,) = judge_accuracy(dataclasses.replace(good, metric_drop_ci95=(-0.001, 0.0091)), **LIMITS)
    assert "accuracy loses -0.001 to 0.0091 of 0.9, inference.max_metric_drop_pct 1 allows 0.009" in lost


def test_what_works_passes_and_what_gains_nothing_does_not():
    assert judge(engine="compile", n_graph_runs=3) == []
    assert judge(gain=None) == []
    (failure,) = judge(engine="compile", gain=compare_pairs([0.004, 0.02, -0.01, 0.005]))
    assert "no gain is proven, it is 1.0" in failure


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def test_another_kernel_of_attention_than_the_plans_is_caught():
    assert judge(attention="flash", operators=("aten::addmm", FLASH)) == []
    assert judge(attention="math", operators=("aten::addmm", "aten::_softmax")) == []
    for asked, operators, ran in (
        ("flash", (), "another"),
        ("math", (FLASH,), "flash"),
        ("efficient", (FLASH,), "flash"),
    ):
        assert judge(attention=asked, operators=operators) == [
            f"effect: attention {asked} did not run: the kernel was {ran}"
        ]


# Six settings that did nothing, each seen in a released library. The second and the sixth are in test_infer_engines.


def call(model, dtype=torch.float32):
    def run(inputs):
        with torch.no_grad():
            return (model(torch.from_numpy(inputs[0]).to(dtype)).float().numpy(),)

    return run


BATCHES = [(np.random.default_rng(0).normal(size=(16, 512)).astype(np.float32),)]


def test_no_op_1_torchaos_dynamic_int8_in_eager_mode_is_slower_than_fp32():
    """pytorch/ao#3157, #4365: 15 times slower than fp32 on AVX2."""
    quantization = pytest.importorskip("torchao.quantization")
    layer = nn.Sequential(nn.Linear(512, 512)).eval()
    quantized = copy.deepcopy(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization.quantize_(quantized, quantization.Int8DynamicActivationInt8WeightConfig())
    gain = compare_speed(call(layer), call(quantized), BATCHES, limit_s=0.5)
    if gain.gain_pct > 0:
        pytest.skip(f"this machine's int8 is {gain.speedup:.1f} times as fast")
    (failure,) = judge(quantization="int8", operators=("quantized::linear_dynamic",), gain=gain)
    assert "no gain is proven" in failure


def test_no_op_3_a_compiled_model_that_calls_go_around_ran_no_graph():
    """huggingface/sentence-transformers#3791: ``compile()`` compiled ``__call__``, and ``encode`` went to forward."""
    model, graphs = nn.Linear(4, 2), CompiledGraphs()
    model.compile(backend=graphs)

    def encode(inputs):
        return model.forward(inputs)

    encode(torch.zeros(3, 4))
    assert judge(engine="compile", n_graph_runs=graphs.n_runs) == [
        "effect: no compiled graph ran: calls go around it, in eager mode"
    ]


EMULATED = """
import json, sys
import torch
from fulltilt.infer.gates.effect import compare_speed
from fulltilt.records import encode
from tests.unit.infer.test_infer_gates import BATCHES, call
torch.set_num_threads(1)
layer = torch.nn.Linear(512, 512).eval()
short = torch.nn.Linear(512, 512).eval().bfloat16()
print(json.dumps(encode(compare_speed(call(layer), call(short, torch.bfloat16), BATCHES, limit_s=1))))
"""


@pytest.mark.slow
def test_no_op_4_bf16_without_the_instructions_is_emulated():
    """The libraries are told that the CPU has none; where it has none indeed, the fact alone is enough."""
    masked = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    done = subprocess.run(
        [sys.executable, "-c", EMULATED], env=os.environ | masked, cwd=ROOT, capture_output=True, text=True
    )
    gain = decode(Comparison, json.loads(done.stdout))
    failures = judge(precision="bf16", gain=gain)
    assert failures[0] == "effect: bf16 is emulated: this CPU has no bf16 arithmetic"
    assert "no gain is proven" in failures[1]
    assert judge(GPU, precision="bf16") == []


def test_no_op_5_an_option_that_nothing_reads_has_no_gain():
    """Lightning-AI/LitServe#751: ``fast_queue=True`` went to a keyword that nobody had."""
    layer = nn.Linear(512, 512).eval()

    def serve(**options):  # as there
        return call(layer)

    gains = [compare_speed(serve(), serve(fast_queue=True), BATCHES, limit_s=0.5) for _ in range(2)]
    seen = [judge(engine="onnx", gain=gain) for gain in gains]
    assert any("no gain is proven" in failure for failures in seen for failure in failures), "1 of 100 may be wrong"


def test_a_gain_is_measured_in_turns_and_an_equal_arm_has_none():
    now_s, draws = 0.0, np.random.default_rng(3)

    def take(seconds):
        def answer(inputs):
            nonlocal now_s
            now_s += seconds * (1 + now_s / 200) * draws.uniform(0.95, 1.05)  # the machine gets slower all the time

        return answer

    clock = lambda: now_s  # noqa: E731
    gain = compare_speed(take(0.2), take(0.1), [(), ()], limit_s=0, clock=clock)
    assert gain.verdict == "faster"
    assert gain.gain_pct == pytest.approx(100, abs=10)
    assert gain.ci_pct[1] < gain.ci_pct[0] + 30
    assert compare_speed(take(0.1), take(0.1), [(), ()], limit_s=0, clock=clock).verdict != "faster"
