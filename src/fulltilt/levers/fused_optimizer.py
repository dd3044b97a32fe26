"""fused_optimizer: one kernel updates all parameters instead of several a tensor."""

from typing import Any

from fulltilt.errors import PlanObstacleError
from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup

FUSED_ON = {"Adam": ("cpu", "cuda"), "AdamW": ("cpu", "cuda"), "SGD": ("cpu", "cuda"), "Adagrad": ("cpu",)}
"""Devices on which optimizers of torch.optim have a fused step (torch 2.11 to 2.13)."""


def _find_obstacle(value: bool, plan: PlanValues, facts: Facts) -> str | None:
    devices = FUSED_ON.get(facts.optimizer or "", ())
    if facts.optimizer is None or facts.device_type in devices:
        return None
    where = f"on {facts.device_type} " if devices else ""
    have = ", ".join(FUSED_ON)
    return f"{facts.optimizer} has no fused step {where}(it exists for {have}); use fused_optimizer false"


def _apply(setup: Setup, value: bool) -> None:
    """Set the switch on the built optimizer, so that a user's own factory needs no argument for it.

    Raises:
        PlanObstacleError: the optimizer has no such switch, has already stepped, or excludes it by its other options.
    """
    if not value:
        _switch_off(setup)
        return
    import torch

    optimizer = setup.optimizer
    if "fused" not in optimizer.defaults:
        raise PlanObstacleError(f"fused_optimizer=True: {type(optimizer).__name__} has no fused step")
    if _has_stepped(optimizer):
        raise PlanObstacleError("fused_optimizer=True: the optimizer has already stepped; set it before the first step")
    for group in optimizer.param_groups:
        for option in ("foreach", "differentiable"):
            if group.get(option):
                raise PlanObstacleError(f"fused_optimizer=True: the optimizer was built with {option}=True; remove it")
        group["fused"] = True
        for parameter in group["params"]:
            if not torch.is_floating_point(parameter):
                raise PlanObstacleError(f"fused_optimizer=True: a parameter is {parameter.dtype}, not floating point")
            step = optimizer.state.get(parameter, {}).get("step")
            if step is not None:
                optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)
    optimizer.defaults["fused"] = True
    # What the constructors of torch.optim set beside the flag: a scaler hands its scale to the kernel instead of
    # reading found_inf on the host, and SGD and Adagrad check devices on the first step.
    optimizer._step_supports_amp_scaling = True
    optimizer._need_device_dtype_check_for_fused = True


def _switch_off(setup: Setup) -> None:
    """Switch off what an optimizer's own factory switched on, and tell the user."""
    fused = [group for group in setup.optimizer.param_groups if group.get("fused")]
    for group in fused:
        group["fused"] = False
    if fused:
        setup.optimizer.defaults["fused"] = False
        setup.optimizer._step_supports_amp_scaling = False
        setup.notes.append(
            "fused_optimizer=False: the optimizer was built with fused=True and runs without it; set "
            "speed.fused_optimizer to true to keep it"
        )


def _has_stepped(optimizer: Any) -> bool:
    """Whether the optimizer has stepped. Adagrad fills its state when it is built, the others at their first step."""
    return any(float(state.get("step", 1)) > 0 for state in optimizer.state.values())


def _observe(setup: Setup) -> bool:
    return all(bool(group.get("fused")) for group in setup.optimizer.param_groups)


LEVER = Lever(
    name="fused_optimizer",
    key="speed.fused_optimizer",
    aliases=("fused",),
    summary="One kernel updates all parameters (fused=True of torch.optim).",
    doc=(
        "By default the optimizers run one kernel per operation (foreach on CUDA) or per operation and tensor "
        "(CPU). The optimizer's part of the step shrinks: 22 to 8 ms, 3 % of the step, in "
        "deepmodeling/deepmd-kit#4463; 1.5 to 2 % MFU in pytorch/torchtitan#355. With fp16 it also spares the scaler's "
        "wait for the device in every step. Rounding differs in the last bits."
    ),
    trades=("speed", "numerics"),
    stage="optimizer",
    candidates=lambda facts: (False,) if _find_obstacle(True, {}, facts) else (False, True),
    obstacle=_find_obstacle,
    apply=_apply,
    observe=_observe,
)
