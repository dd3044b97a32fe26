"""The levers of inference: what can apply where, what is worth trying, and where a configuration states them."""

import importlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from fulltilt.config import config_from_values, inference_plan_of
from fulltilt.errors import ConfigError
from fulltilt.levers import Facts, Setup, find_obstacles, load_catalogue, load_inference_catalogue

ALL = ("onnx", "onnxruntime", "onnxscript", "torchao", "mslk")
CPU = Facts(device_type="cpu", n_cores_usable=4, packages=ALL, has_c_compiler=True, has_linear=True, has_attention=True)
GPU = replace(CPU, device_type="cuda", compute_capability=(8, 6))
DEFAULTS = {name: lever.default for name, lever in load_inference_catalogue().items()}


@pytest.mark.parametrize(
    ("change", "facts", "word"),
    [
        ({"engine": "compile"}, replace(CPU, has_c_compiler=False), "install g++"),
        ({"engine": "onnx"}, replace(CPU, packages=("onnx", "onnxscript")), "needs onnxruntime; pip install"),
        ({"engine": "onnx"}, GPU, "computes on the CPU"),
        ({"engine": "aot", "quantization": "int8"}, CPU, "use engine onnx or compile"),
        ({"quantization": "int8"}, GPU, "use int8_weights"),
        ({"quantization": "int8"}, replace(CPU, has_linear=False), "no linear layer"),
        ({"quantization": "int8", "precision": "bf16"}, CPU, "use precision fp32, not bf16"),
        ({"quantization": "int8_weights"}, replace(CPU, packages=()), "needs torchao"),
        ({"quantization": "int8", "engine": "compile"}, replace(CPU, packages=()), "needs torchao"),
        ({"quantization": "int8_weights", "engine": "onnx"}, CPU, "use quantization int8"),
        ({"quantization": "int4_weights"}, CPU, "for GPUs"),
        ({"quantization": "int4_weights"}, GPU, "set precision bf16"),
        ({"quantization": "int4_weights"}, replace(GPU, compute_capability=(7, 5)), "compute capability 8.0"),
        ({"quantization": "int4_weights", "precision": "bf16"}, replace(GPU, packages=("torchao",)), "need mslk"),
        ({"attention": "flash"}, replace(CPU, has_attention=False), "does not call"),
        ({"attention": "efficient"}, CPU, "one of GPUs"),
        ({"attention": "flash"}, GPU, "set precision bf16"),
        ({"attention": "math", "engine": "onnx"}, CPU, "its own attention"),
        ({"attention": "math", "engine": "aot"}, CPU, "cannot be seen"),
        ({"cuda_graphs": True}, CPU, "NVIDIA GPUs only"),
        ({"cuda_graphs": True, "engine": "aot"}, GPU, "set engine compile"),
        ({"engine": "onnx", "precision": "bf16"}, CPU, "use engine aot for bf16"),
        ({"precision": "tf32"}, CPU, "compute capability 8.0"),
        ({"threads": 4097}, CPU, "at most 4,096"),
    ],
)
def test_values_that_cannot_apply_say_why(change, facts, word):
    reasons = find_obstacles({**DEFAULTS, **change}, facts, load_inference_catalogue())
    assert len(reasons) == 1, reasons
    assert word in reasons[0]


def test_candidates_are_those_that_can_be_fast_on_the_device():
    catalogue = load_inference_catalogue()
    found = {name: tuple(lever.candidates(CPU)) for name, lever in catalogue.items()}
    assert found == {
        "engine": ("eager", "compile", "aot", "onnx"),
        "quantization": ("none", "int8"),
        "attention": ("auto",),
        "cuda_graphs": (False,),
        "precision": ("fp32",),
        "threads": (None, 1, 2),
    }
    assert catalogue["engine"].candidates(replace(CPU, packages=(), has_c_compiler=False)) == ("eager",)
    found = {name: tuple(lever.candidates(GPU)) for name, lever in catalogue.items()}
    assert found["quantization"] == ("none", "int8_weights", "int4_weights")
    assert found["engine"] == ("eager", "compile", "aot")
    assert found["cuda_graphs"] == (False, True)
    assert {"bf16", "fp16", "tf32"} < set(found["precision"])


def test_a_configuration_states_them_and_training_has_none_of_them():
    config = config_from_values(
        {"task": "classification", "inference": {"engine": "onnx", "quantization": "int8"}, "speed": {"threads": 2}},
        base_dir="",
    )
    plan = inference_plan_of(config)
    assert {**plan} == {**DEFAULTS, "engine": "onnx", "quantization": "int8", "threads": 2}
    assert {"engine", "quantization", "attention", "cuda_graphs"}.isdisjoint(load_catalogue())
    with pytest.raises(ConfigError, match="did you mean engine"):
        config_from_values({"inference": {"engin": "onnx"}}, base_dir="")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        q = self.linear(x)[:, None]
        return (nn.functional.scaled_dot_product_attention(q, q, q),)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", "bf16"), ("precision", "fp16"), ("quantization", "int8"), ("quantization", "int8_weights"),
        ("attention", "math"), ("attention", "flash"),
    ],
)  # fmt: skip
def test_a_value_is_read_back_from_the_model_that_it_changed_and_outputs_stay_close(name, value):
    if value == "int8_weights":
        pytest.importorskip("torchao")
    torch.manual_seed(0)
    lever, x = load_inference_catalogue()[name], torch.randn(4, 6, 8)
    setup = Setup(device=torch.device("cpu"), model=Model().eval())
    with torch.no_grad():
        (before,) = setup.model(x)
        assert lever.observe(setup) == lever.default
        lever.apply(setup, lever.default)
        assert type(setup.model) is Model
        lever.apply(setup, value)
        assert lever.observe(setup) == value
        (after,) = setup.model(x)
    assert after.dtype == torch.float32
    torch.testing.assert_close(after, before, atol=0.03, rtol=0.03)


def test_nothing_of_the_catalogue_loads_torch():
    module = importlib.import_module("fulltilt.levers.inference.quantization")
    assert not hasattr(module, "torch")
