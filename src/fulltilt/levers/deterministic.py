"""deterministic: torch takes reproducible operators only, so that reruns of a seed are equal to the last bit."""

import os

from fulltilt.levers._spec import Lever, Setup

_COST = (
    "an operator that has no reproducible form ends the run with its name; what reproducible forms cost here is "
    "measured by benchmark.levers {deterministic: [false, true]}"
)


def _apply(setup: Setup, value: bool) -> None:
    import torch

    if value:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is not reproducible without it
    elif torch.are_deterministic_algorithms_enabled():
        setup.notes.append(
            "deterministic=False: torch.use_deterministic_algorithms was on and is off for this run; set "
            "run.deterministic to true to keep it"
        )
    # Set for both values: the flags are process-wide and an earlier plan may have changed them.
    torch.use_deterministic_algorithms(value)
    torch.backends.cudnn.deterministic = value


def _observe(setup: Setup) -> bool:
    """Read both flags of the process: that of operators and that of cuDNN."""
    import torch

    return torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic


LEVER = Lever(
    name="deterministic",
    key="run.deterministic",
    summary="Refuse operators that are not reproducible: reruns of a seed are equal to the last bit.",
    doc=(
        "A run starts from its seed either way. What then differs from run to run on a GPU are sums whose order the "
        "hardware decides (scatter, index_add, some backward passes of convolutions). With this, reproducible forms "
        "are taken, and an operator without one ends the run. It excludes what picks kernels by timing them "
        "(cudnn_benchmark, compile: max-autotune). The cost depends on the operators and has to be measured; on a "
        "CPU most are reproducible anyway. Fast mode is the other side: false, with cudnn_benchmark and a lower "
        "precision. Equal means: same machine, same versions, same number of threads and data workers' order."
    ),
    trades=("speed", "numerics", "reproducibility"),
    stage="environment",
    restart=True,
    remark=lambda value, plan, facts: _COST,
    apply=_apply,
    observe=_observe,
    is_offered=False,
)
