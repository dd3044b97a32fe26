"""precision: the number format that matrix products and convolutions of the step are computed in."""

from typing import Any, Literal

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")


def resolve(value: str, facts: Facts) -> tuple[str, str | None]:
    """Turn ``auto`` (``use_amp: true``) into a precision for this machine, with a note when it is not mixed precision.

    It is bf16 where the hardware computes in it, else fp16 with a scaler on a GPU, else fp32.
    """
    if value != "auto":
        return value, None
    if _has_native_bf16(facts):
        return "bf16", None
    if facts.device_type == "cuda":
        if facts.compute_capability is None or facts.compute_capability >= (7, 0):
            return "fp16", None
        return "fp32", f"mixed precision gains nothing on compute capability {_dotted(facts)} (7.0 and above do); fp32"
    return "fp32", "this CPU does not compute in bf16, so mixed precision would be emulated; fp32 is used"


def _has_native_bf16(facts: Facts) -> bool:
    if facts.has_native_bf16 is not None:
        return facts.has_native_bf16
    return facts.device_type == "cuda" and (facts.compute_capability or (0, 0)) >= (8, 0)


def _dotted(facts: Facts) -> str:
    return ".".join(str(part) for part in facts.compute_capability or ())


def _candidates(facts: Facts) -> tuple[str, ...]:
    values = ["fp32"]
    if facts.device_type == "cuda" and (facts.compute_capability or (8, 0)) >= (8, 0):
        values.append("tf32")
    mixed, _ = resolve("auto", facts)
    return (*values, mixed) if mixed not in values else tuple(values)


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value not in PRECISIONS:
        return f"unknown precision; valid: {', '.join(PRECISIONS)}"
    on_cuda, capability = facts.device_type == "cuda", facts.compute_capability
    if value == "tf32" and not on_cuda:
        return "TF32 exists on NVIDIA GPUs of compute capability 8.0 and above only; use fp32 or bf16"
    if value in ("tf32", "bf16") and on_cuda and capability is not None and capability < (8, 0):
        remedy = "use fp16" if capability >= (7, 0) else "use fp32"
        return f"needs compute capability 8.0, this device has {_dotted(facts)}; {remedy}"
    return None


def _remark(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value == "bf16" and facts.device_type == "cpu" and facts.has_native_bf16 is False:
        return "this CPU has no bf16 arithmetic: it is emulated, which saves memory and costs speed"
    if value == "fp16" and facts.device_type == "cpu":
        return "few CPUs compute in fp16: it is usually slower than fp32 there"
    return None


def _apply(setup: Setup, value: str) -> None:
    import torch

    # Set for every value: the flag is process-wide and an earlier plan may have changed it.
    torch.set_float32_matmul_precision("high" if value == "tf32" else "highest")
    setup.autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(value)
    setup.scaler = torch.amp.GradScaler(setup.device.type) if value == "fp16" else None


def _observe(setup: Setup) -> str:
    """Read the format seen inside the first step; before any step, the one the step is set up with."""
    import torch

    dtype = setup.state.get("autocast_dtype", setup.autocast_dtype)
    if dtype is torch.bfloat16:
        return "bf16"
    if dtype is torch.float16:
        has_scaler = setup.scaler is not None and setup.scaler.is_enabled()
        return "fp16" if has_scaler else "fp16 without a scaler"
    return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _parse_alias(alias: str, value: Any) -> Any:
    """Turn ``use_amp: true`` into the mixed precision that suits the machine, and other spellings into ours."""
    if isinstance(value, bool):
        return "auto" if value else "fp32"
    names = {"16": "fp16", "32": "fp32", "no": "fp32", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    return names.get(str(value).removesuffix("-mixed").removesuffix("-true"), value)


LEVER = Lever(
    name="precision",
    key="speed.precision",
    aliases=("use_amp", "mixed_precision", "amp"),
    type=Literal["fp32", "tf32", "bf16", "fp16"],
    default="fp32",
    summary="Number format of matrix products and convolutions: fp32, tf32, bf16, or fp16 with a loss scaler.",
    doc=(
        "fp32 is PyTorch's default: matrix products in full float32 (cuDNN's convolutions may use TF32 on GPUs that "
        "have it). tf32 rounds the inputs of fp32 matrix products to 10 bits of mantissa on tensor cores. bf16 and "
        "fp16 run under autocast with fp32 weights; fp16 needs the scaler because small gradients vanish, and a "
        "step whose gradients overflow is left out. Gains are bounded by the share of matrix products and "
        "convolutions in the step. A GPU has bf16 from compute capability 8.0; a CPU computes in it with "
        "AVX512-BF16 or AMX, else it emulates."
    ),
    trades=("speed", "memory", "numerics"),
    stage="step",
    candidates=_candidates,
    obstacle=_find_obstacle,
    remark=_remark,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: float(PRECISIONS.index(value)),
    parse_alias=_parse_alias,
)
