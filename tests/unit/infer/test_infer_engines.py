"""Every engine answers as eager does, for batches and lengths it was not built with, and builds nothing anew."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.levers.test_levers_cuda_graphs import call_instead
from torch import nn

from fulltilt.config import config_from_values, inference_plan_of
from fulltilt.infer.artefact import Artefact, build_artefact, open_artefact
from fulltilt.infer.building import judge_candidate, measure_accuracy
from fulltilt.infer.engines import find_engine
from fulltilt.infer.engines._torch import N_RECORDED, TorchRunner
from fulltilt.infer.gates.accuracy import judge_accuracy
from fulltilt.infer.gates.effect import judge_effect
from fulltilt.infer.manifest import Policy
from fulltilt.infer.model import build_inference_model
from fulltilt.levers import Facts
from fulltilt.levers.compile import CompiledGraphs
from fulltilt.levers.inference.cuda_graphs import Recorded

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
"""Of what torch's compilers do themselves."""

ENGINES = {
    "eager-flash": ({"attention": "flash"}, 100, "_scaled_dot_product_flash_attention_for_cpu"),
    "eager-math": ({"attention": "math"}, 100, "aten::_scaled_dot_product_attention_math"),
    "eager-bf16": ({"precision": "bf16"}, 20, "aten::addmm"),
    "eager-int8_weights": ({"quantization": "int8_weights"}, 30, "aten::mm"),
    "compile": ({"engine": "compile"}, 90, "CompiledFxGraph"),
    "compile-int8": ({"engine": "compile", "quantization": "int8"}, 25, "aten::_int_mm"),
    "aot": ({"engine": "aot"}, 90, ""),
    "onnx": ({"engine": "onnx"}, 90, "MatMul"),
    "onnx-int8": ({"engine": "onnx", "quantization": "int8"}, 25, "DynamicQuantize"),
}
PACKAGES = {"onnx": ("onnxruntime", "onnxscript"), "int8_weights": ("torchao",), "int8": ("torchao",)}


@pytest.fixture(scope="module")
def model():
    values = {"task": "tests.unit.infer.small_encoder:with_states", "run": {"device": "cpu"}, "speed": {"threads": 1}}
    return build_inference_model(config_from_values(values, base_dir=""), device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_answers_all_declared_shapes_as_eager_does(model, tmp_path, name):
    changes, least_db, operator = ENGINES[name]
    for value in changes.values():
        for package in PACKAGES.get(value, ()):
            pytest.importorskip(package)
    plan = inference_plan_of(model.config).replace(**changes)
    before = torch.get_num_threads()
    try:
        build_artefact(model, plan, tmp_path)
        opened = open_artefact(tmp_path)
        assert not opened.notes, opened.notes
        accuracy = measure_accuracy(model, opened)
        assert accuracy.sqnr_db >= least_db
        n_builds, _ = opened.run.count_graphs()
        for inputs in opened.list_shapes((1, 2, 7)):
            opened.run(inputs)
        n_after, n_runs = opened.run.count_graphs()
        assert n_after == n_builds, "declared shapes are served by what is there"
        assert n_runs is None or n_runs > 0
        seen = opened.run.list_operators(opened.list_shapes()[0])
        assert any(operator in each for each in seen), seen
    finally:
        torch.set_num_threads(before)


def test_threads_of_onnx_runtime_that_wait_for_a_call_leave_the_cores_to_others(tmp_path):
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from fulltilt.infer.engines.onnx import OnnxRunner

    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [None, 256]) for name in "xy")
    w = onnx.numpy_helper.from_array(np.ones((256, 256), np.float32), "w")
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "product", [x], [y], [w])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset), tmp_path / "model.onnx")
    run, inputs = OnnxRunner(tmp_path / "model.onnx", ["x"], 4), (np.ones((512, 256), np.float32),)
    waited_s = []
    for _ in range(20):
        run(inputs)
        began_s = time.process_time()
        time.sleep(0.02)
        waited_s.append(time.process_time() - began_s)
    assert np.median(waited_s) < 0.002, "three threads that spin take 0.02 s each, or what other work leaves them of it"


@pytest.mark.slow
def test_no_op_2_a_package_whose_int8_weights_are_multiplied_in_fp32_is_caught(model, tmp_path):
    """pytorch/ao#4566. The package is faster than eager, but not by int8."""
    pytest.importorskip("torchao")
    plan = inference_plan_of(model.config).replace(engine="aot", quantization="int8_weights")
    build_artefact(model, plan, tmp_path)
    _, failures = judge_candidate(model, tmp_path)
    assert any("quantization int8_weights did not run" in failure for failure in failures), failures


@pytest.mark.slow
def test_no_op_6_graphs_that_are_built_anew_at_every_shape_are_counted():
    """pytorch/pytorch#188150: CUDA graphs recorded anew where padding is dynamic; on a CPU, compiled anew."""
    graphs = CompiledGraphs()
    compiled = torch.compile(nn.Linear(4, 2).eval(), backend=graphs, dynamic=False)
    with torch.no_grad():
        compiled(torch.zeros(2, 4))
        n_warm = graphs.n_graphs
        for n in (3, 5, 8):
            compiled(torch.zeros(n, 4))
    plan = {"engine": "compile", "quantization": "none", "attention": "auto", "precision": "fp32"}
    seen = {"operators": (), "n_builds": graphs.n_graphs - n_warm, "n_graph_runs": graphs.n_runs, "gain": None}
    (failure,) = judge_effect(plan, Facts(device_type="cpu"), **seen)
    assert "3 graphs were built anew within the declared shapes; use another engine" in failure


def test_batches_are_filled_up_to_shapes_that_were_recorded_before_the_first_answer(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Recorded, "_capture", call_instead)
    manifest = build_artefact(model, inference_plan_of(model.config), tmp_path).manifest
    eager = open_artefact(tmp_path)
    graphs = replace(manifest, plan={**manifest.plan, "cuda_graphs": True})
    filled = Artefact(tmp_path, graphs, find_engine("eager").load(tmp_path, graphs))
    before = filled.run.count_graphs()[0]
    larger = replace(graphs, policy=Policy(max_batch=16))
    assert find_engine("eager").load(tmp_path, larger).count_graphs()[0] > before
    for samples in (eager.samples[:1], eager.samples[:3], eager.samples[:N_RECORDED]):
        for one, other in zip(filled.answer(samples), eager.answer(samples), strict=True):
            for mine, theirs in zip(one, other, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    assert filled.run.count_graphs()[0] == before >= 4


def test_the_precision_of_products_is_the_artefacts_own_though_another_was_opened_since(model, tmp_path):
    manifest = build_artefact(model, inference_plan_of(model.config), tmp_path).manifest
    seen = []

    def forward(*inputs):
        seen.append(torch.get_float32_matmul_precision())
        return inputs

    tf32 = TorchRunner(forward, model.device, replace(manifest, plan={**manifest.plan, "precision": "tf32"}))
    fp32 = TorchRunner(forward, model.device, manifest)
    for runner in (tf32, fp32, tf32, fp32):
        runner((np.zeros((1, 2)),))
    assert seen == ["high", "highest"] * 2


def test_the_reference_of_a_tf32_candidate_is_answered_in_fp32(model, tmp_path, monkeypatch):
    manifest = build_artefact(model, inference_plan_of(model.config), tmp_path).manifest
    tf32 = replace(manifest, plan={**manifest.plan, "precision": "tf32"})
    seen = []
    answer = type(model).answer
    monkeypatch.setattr(
        type(model),
        "answer",
        lambda self, samples: (seen.append(torch.get_float32_matmul_precision()), answer(self, samples))[1],
    )
    runner = TorchRunner(model.module, model.device, tf32)
    measure_accuracy(model, Artefact(tmp_path, tf32, runner))
    assert len(seen) > 2
    assert set(seen) == {"highest"}
    torch.set_float32_matmul_precision("highest")


def test_each_sample_counts_once_in_the_accuracy(model, tmp_path):
    manifest = build_artefact(model, inference_plan_of(model.config), tmp_path).manifest
    found = measure_accuracy(model, Artefact(tmp_path, manifest, TorchRunner(model.module, model.device, manifest)))
    assert found.n_samples == len(model.samples)
    n_right = found.n_samples * found.metric_fp32
    assert n_right == pytest.approx(round(n_right))


def test_of_several_metrics_the_one_that_loses_most_is_held_to_the_limit(model, tmp_path):
    metrics = {"steady": lambda outputs, targets: torch.ones(len(targets)), **model.workload.metrics}
    two = replace(model, workload=replace(model.workload, metrics=metrics))
    manifest = build_artefact(two, inference_plan_of(model.config), tmp_path).manifest
    runner = TorchRunner(lambda *inputs: tuple(-each for each in two.module(*inputs)), model.device, manifest)
    found = measure_accuracy(two, Artefact(tmp_path, manifest, runner))
    assert found.metric == "accuracy"
    assert [found.metric in said for said in judge_accuracy(found, -math.inf, 1.0)] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("engine", ["eager", "compile"])
def test_cuda_graphs_are_recorded_before_the_first_answer_which_is_that_of_eager_mode(tmp_path, engine):
    values = {"task": "tests.unit.infer.small_encoder:workload", "run": {"device": "cuda"}}
    model = build_inference_model(config_from_values(values, base_dir=""), device="cuda")
    plan = inference_plan_of(model.config).replace(engine=engine, cuda_graphs=True)
    build_artefact(model, plan, tmp_path)
    opened = open_artefact(tmp_path)
    recorded = opened.run.count_graphs()[0]
    assert recorded >= 4
    for samples in (opened.samples[:1], opened.samples[:3], opened.samples[:N_RECORDED]):
        for mine, eager in zip(opened.answer(samples), model.answer(samples), strict=True):
            np.testing.assert_allclose(mine[0], eager[0], rtol=1e-3, atol=1e-4)
    assert opened.run.count_graphs()[0] == recorded
