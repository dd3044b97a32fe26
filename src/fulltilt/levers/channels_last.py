"""channels_last: image tensors and convolution weights stored with the channels innermost."""

from fulltilt.levers._spec import Lever, Setup

_NO_CONVOLUTION = "the model has no 2-d convolution; use channels_last false"


def _apply(setup: Setup, value: bool) -> None:
    if not value:
        return
    import torch

    setup.model = setup.model.to(memory_format=torch.channels_last)
    setup.input_memory_format = torch.channels_last


def _observe(setup: Setup) -> bool:
    """Whether every 4-d weight, and the first 4-d input of a step, is stored channels last."""
    import torch

    if setup.input_memory_format is not torch.channels_last:
        return False
    weights = [p for p in setup.model.parameters() if p.dim() == 4]
    in_format = all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    return in_format and setup.state.get("input_channels_last") is not False


LEVER = Lever(
    name="channels_last",
    key="speed.channels_last",
    summary="Image tensors and convolution weights are stored with the channels innermost (NHWC).",
    doc=(
        "The layout tensor cores and oneDNN work in, so conversions between layers fall away. Over 834 timm models "
        "trained with AMP on an RTX 3090 (torch 1.12): median 1.12 times as fast, 61 % gained more than 5 %, 13 % got "
        "slower (timm's published benchmark tables). In fp32 it is often slower (pytorch/pytorch#50036). A layer that "
        "falls back to the contiguous layout costs a conversion each way. Dropout of image tensors draws in the order "
        "of memory, so its masks are others."
    ),
    trades=("speed", "numerics"),
    stage="model",
    candidates=lambda facts: (False, True) if facts.has_conv is not False else (False,),
    obstacle=lambda value, plan, facts: _NO_CONVOLUTION if facts.has_conv is False else None,
    apply=_apply,
    observe=_observe,
)
