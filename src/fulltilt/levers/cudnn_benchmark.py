"""cudnn_benchmark: cuDNN times its convolution algorithms on the first step of each shape and keeps the fastest."""

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    if facts.device_type != "cuda":
        return "cuDNN runs on CUDA devices only; use cudnn_benchmark false"
    if plan.get("deterministic"):
        return "timing picks another algorithm from run to run, which a deterministic run excludes; use one of the two"
    has_conv = facts.has_conv or facts.has_any_conv
    if has_conv is False and facts.has_conv is not None and facts.has_any_conv is not None:
        return "the model has no convolution for cuDNN to choose an algorithm for; use cudnn_benchmark false"
    return None


def _apply(setup: Setup, value: bool) -> None:
    import torch

    torch.backends.cudnn.benchmark = value


def _observe(setup: Setup) -> bool:
    import torch

    return torch.backends.cudnn.benchmark


LEVER = Lever(
    name="cudnn_benchmark",
    key="speed.cudnn_benchmark",
    summary="cuDNN times its convolution algorithms once per input shape and keeps the fastest.",
    doc=(
        "Concerns convolutions of fixed shape only. speechbrain/speechbrain#294 reports 17 to 12 minutes on a V100; a "
        "transformer gains nothing; shapes that vary are timed again and again (0.02 s became up to 2.3 s in "
        "pytorch/pytorch#2759). The fastest algorithm may need much more workspace (2.7 GB became 8.2 GB in "
        "huggingface/diffusers#2763) and may add in another order from run to run."
    ),
    trades=("speed", "memory", "numerics", "reproducibility"),
    stage="environment",
    candidates=lambda facts: (False, True) if facts.device_type == "cuda" else (False,),
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
)
