"""quantization: weights, or weights and activations, in 8 or 4 bits."""

import functools
import warnings
from typing import Any, Literal

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup

VALUES = ("none", "int8", "int8_weights", "int4_weights")
GROUP_SIZE = 32  # weights that share one scale, with 4 bits
INT4_CAPABILITY = (8, 0)


def _candidates(facts: Facts) -> tuple[str, ...]:
    """Offer int8 on a CPU, and weights alone on a GPU, where reading them takes the time."""
    values = ("none", "int8") if facts.device_type == "cpu" else ("none", "int8_weights", "int4_weights")
    return tuple(value for value in values if _find_obstacle(value, {}, facts) is None)


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value == "none":
        return None
    if facts.has_linear is False:
        return "the model has no linear layer to quantise; use quantization none"
    engine, precision = plan.get("engine", "eager"), plan.get("precision", "fp32")
    if value == "int8":
        if facts.device_type != "cpu":
            return "dynamic int8 computes on a CPU; use int8_weights"
        if engine == "aot":
            return "PyTorch cannot export its dynamic int8 layers; use engine onnx or compile"
        if precision != "fp32":
            return f"its other layers compute in fp32; use precision fp32, not {precision}"
        if engine != "compile":
            return None
    if facts.packages is not None and "torchao" not in facts.packages:
        return "needs torchao; pip install 'fulltilt[infer]'"
    if engine == "onnx":
        return "ONNX Runtime takes int8 with its activations; use quantization int8"
    return _find_obstacle_of_4_bits(precision if plan else "bf16", facts) if value == "int4_weights" else None


def _find_obstacle_of_4_bits(precision: str, facts: Facts) -> str | None:
    if facts.device_type != "cuda":
        return "torchao has 4-bit kernels for GPUs, and keeps 8 bits elsewhere; use int8_weights"
    if facts.compute_capability is not None and facts.compute_capability < INT4_CAPABILITY:
        return "4-bit kernels need compute capability 8.0; use int8_weights"
    if precision != "bf16":
        return "4-bit kernels multiply bf16 activations; set precision bf16"
    if facts.packages is not None and "mslk" not in facts.packages:
        return "torchao's 4-bit kernels need mslk; pip install mslk, or use int8_weights"
    return None


def _remark(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value.endswith("_weights") and facts.device_type == "cpu":
        return "on a CPU it saves memory and no time: weights are converted before they are multiplied"
    return None


def _apply(setup: Setup, value: str) -> None:
    setup.state["quantization"] = value
    if value == "none" or setup.state.get("engine") == "onnx":  # ONNX Runtime quantises the graph
        return
    import torch

    with warnings.catch_warnings():
        # Both warn: the one of its replacement, which is 15 times slower than fp32 on AVX2, the other of PyTorch's own.
        warnings.simplefilter("ignore")
        if value == "int8" and setup.state.get("engine") == "eager":
            kinds = {torch.nn.Linear, torch.nn.LSTM, torch.nn.GRU}
            setup.model = torch.ao.quantization.quantize_dynamic(setup.model, kinds, dtype=torch.qint8)
        else:
            _quantize_by_torchao(setup.model, value)


def _quantize_by_torchao(model: Any, value: str) -> None:
    from torchao import quantization as ao

    configs = {
        "int8": ao.Int8DynamicActivationInt8WeightConfig,
        "int8_weights": ao.Int8WeightOnlyConfig,
        "int4_weights": functools.partial(ao.Int4WeightOnlyConfig, group_size=GROUP_SIZE),
    }
    ao.quantize_(model, configs[value]())


def _observe(setup: Setup) -> str:
    """Read the kind of the model's layers, or what the ONNX graph was written with."""
    if setup.state.get("engine") == "onnx":
        return setup.state["quantization"]
    for module in setup.model.modules():
        if type(module).__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return "int8"
        for parameter in module.parameters(recurse=False):
            kind = type(parameter.data).__name__  # torchao's Int8Tensor, Int4Tensor
            if kind.startswith("Int8"):
                return "int8" if getattr(parameter, "act_quant_kwargs", None) else "int8_weights"
            if kind.startswith("Int4"):
                return "int4_weights"
    return "none"


LEVER = Lever(
    name="quantization",
    key="inference.quantization",
    type=Literal["none", "int8", "int8_weights", "int4_weights"],
    default="none",
    summary="Linear layers multiply in int8, or keep their weights in 8 or 4 bits.",
    doc=(
        "int8 quantises weights beforehand and activations as they come (dynamic), in PyTorch's fbgemm kernels or "
        "those of ONNX Runtime: 1.5 to 2.3 and 1.4 to 2.9 times as fast as eager fp32 on a CPU with AVX2, errors 25 "
        "to 36 dB below the outputs of random weights. There ONNX Runtime keeps weights to 7 bits (reduce_range), or "
        "sums of two products saturate; that costs no time and gains 2 to 3 dB. PyTorch calls its own deprecated in "
        "favour of torchao's, which in eager mode is 15 times slower than fp32 on that CPU; engine compile alone "
        "takes it, with constants frozen, because every layer of PyTorch's own breaks the compiled graph. "
        "int8_weights and int4_weights are torchao's: for a GPU whose time goes into reading weights (a batch of few "
        "tokens); on a CPU they save memory only. The accuracy gate decides whether a model stands it."
    ),
    trades=("speed", "memory", "numerics"),
    stage="model",
    restart=True,
    candidates=_candidates,
    obstacle=_find_obstacle,
    remark=_remark,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: float(VALUES.index(value)),
)
