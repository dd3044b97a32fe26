"""attention: the kernel of ``scaled_dot_product_attention``."""

from typing import Literal

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup

BACKENDS = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def _candidates(facts: Facts) -> tuple[str, ...]:
    return ("auto",) if facts.device_type == "cpu" or facts.has_attention is False else ("auto", "flash", "efficient")


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value == "auto":
        return None
    if facts.has_attention is False:
        return "the model does not call scaled_dot_product_attention; use attention auto"
    if plan.get("engine") == "onnx":
        return "ONNX Runtime has its own attention; use attention auto"
    if plan.get("engine") == "aot":
        return "which kernel a package calls cannot be seen; use attention auto, or engine eager or compile"
    if value == "efficient" and facts.device_type == "cpu":
        return "the memory-efficient kernel is one of GPUs; use attention flash or math"
    if value == "flash" and facts.device_type == "cuda" and plan.get("precision", "bf16") not in ("bf16", "fp16"):
        return "the flash kernel of a GPU computes in bf16 and fp16; set precision bf16, or use attention efficient"
    return None


def _apply(setup: Setup, value: str) -> None:
    if value == "auto":
        return
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, BACKENDS[value])

    class WithAttention(torch.nn.Module):
        """Calls a model with one attention kernel allowed: another one raises instead of standing in."""

        chosen = value

        def __init__(self, model: torch.nn.Module):
            super().__init__()
            self.model = model

        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with sdpa_kernel(backend):
                return self.model(*inputs)

    setup.model = WithAttention(setup.model)


def _observe(setup: Setup) -> str:
    return next((module.chosen for module in setup.model.modules() if hasattr(module, "chosen")), "auto")


LEVER = Lever(
    name="attention",
    key="inference.attention",
    type=Literal["auto", "math", "flash", "efficient"],
    default="auto",
    summary="The kernel of scaled_dot_product_attention: PyTorch's choice, or this one and no other.",
    doc=(
        "auto lets PyTorch choose by device, number format and mask; that is right nearly always. flash takes no mask "
        "of its own shape on a GPU, efficient does, math is the plain formula, for comparison. A kernel that cannot "
        "take the inputs raises, so nothing else answers unnoticed. The kernels differ in rounding: outputs are held "
        "against those of auto by the accuracy gate, as with every lever."
    ),
    trades=("speed", "memory", "numerics"),
    stage="model",
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: float(value != "auto"),
)
