"""precision in inference: the weights themselves are bf16 or fp16, so nothing is converted at each call."""

import dataclasses
from typing import Any

from fulltilt.levers import precision
from fulltilt.levers._spec import Facts, PlanValues, Setup

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def _candidates(facts: Facts) -> tuple[str, ...]:
    values = precision.LEVER.candidates(facts)
    return (*values, "fp16") if facts.device_type == "cuda" and "fp16" not in values else tuple(values)


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if plan.get("engine") == "onnx" and value != "fp32":
        return f"ONNX Runtime computes in fp32 and int8 here; use engine aot for {value}"
    return precision.LEVER.obstacle(value, plan, facts)


def _apply(setup: Setup, value: str) -> None:
    import torch

    torch.set_float32_matmul_precision("high" if value == "tf32" else "highest")
    if value not in DTYPES:
        return
    dtype = getattr(torch, DTYPES[value])

    class InHalf(torch.nn.Module):
        """Calls a model in a shorter format; inputs and outputs are those of fp32."""

        def __init__(self, model: torch.nn.Module):
            super().__init__()
            self.model = model.to(dtype)

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            shorter = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in inputs)
            outputs = self.model(*shorter)
            return tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in outputs)

    setup.model = InHalf(setup.model)


def _observe(setup: Setup) -> Any:
    """Read the format of the weights in force."""
    import torch

    dtypes = {p.dtype for p in setup.model.parameters()} if setup.model is not None else set()
    for name, dtype in DTYPES.items():
        if getattr(torch, dtype) in dtypes:
            return name
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


LEVER = dataclasses.replace(
    precision.LEVER,
    stage="model",
    restart=True,
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
)
