"""compile: torch.compile compiles forward and backward, of the whole model or block by block."""

import contextlib
import dataclasses
import getpass
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from fulltilt.errors import PlanObstacleError
from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup
from fulltilt.levers.activation_checkpointing import find_repeated

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
N_REASONS_SHOWN = 2
MODES = {"reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune-no-cudagraphs"}
"""Value → mode of Inductor. max-autotune goes without CUDA graphs, so that it can accumulate."""


@dataclasses.dataclass(slots=True, eq=False)
class CompiledGraphs:
    """A backend for torch.compile: Inductor, with a count of its graphs and of their runs.

    Only the runs tell whether Dynamo declined a model (an LSTM), which then trains in eager mode. Two backends are
    never equal, because Dynamo reuses the graphs of an equal one.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    began_s: float = dataclasses.field(default_factory=time.time)
    n_graphs: int = 0
    n_runs: int = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.n_graphs += 1
        compiled: Any = compile_fx(graph, example_inputs, config_patches=dict(self.options))

        def run(*args: Any) -> Any:
            self.n_runs += 1
            return compiled(*args)

        return run


def keep_cache() -> None:
    """Let compiled code outlive the machine's next start, unless the user said where it goes or home is read-only.

    It lies in ``$XDG_CACHE_HOME/fulltilt/inductor``, or in ``~/.cache``; torch's default is in /tmp.
    torch names its own place in the environment as soon as Inductor is imported: that is not the user's word.
    """
    torchs_own = str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
    if os.environ.get(CACHE_VARIABLE, torchs_own) != torchs_own:
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fulltilt" / "inductor"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.environ[CACHE_VARIABLE] = str(folder)
    except OSError:
        os.environ[CACHE_VARIABLE] = torchs_own


@contextlib.contextmanager
def without_compiling(setup: Setup) -> Iterator[None]:
    """Run blocks that were compiled in place in eager mode: each other mode or batch size would compile anew."""
    if not _is_regional(setup):
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


def _find_obstacle(value: bool | str, plan: PlanValues, facts: Facts) -> str | None:
    if facts.has_c_compiler is False:
        return "torch.compile needs a C++ compiler and none was found; install g++, or use compile false"
    if value == "regional" and facts.n_checkpointable == 0:
        return "the model has no repeated blocks to compile; use compile true"
    if value == "max-autotune" and plan.get("deterministic"):
        return "kernels are picked by timing, which a deterministic run excludes; use compile true"
    return _find_obstacle_of_graphs(plan, facts) if value == "reduce-overhead" else None


def _find_obstacle_of_graphs(plan: PlanValues, facts: Facts) -> str | None:
    """Say why CUDA graphs cannot hold a step: each run of one writes its gradients where the last run did."""
    if facts.device_type != "cuda":
        return "CUDA graphs exist on NVIDIA GPUs only; use compile true"
    if plan.get("accumulate", 1) != 1:
        return "CUDA graphs overwrite the gradients that accumulate adds up; use accumulate 1, or compile true"
    if facts.n_ranks > 1:
        return "CUDA graphs overwrite gradients that ranks still join; use one device, or compile true"
    return None


def _apply(setup: Setup, value: bool | str) -> None:
    setup.forward = setup.forward or setup.model  # with several devices, DDP is around the model already
    if not value:
        return
    import torch

    keep_cache()
    graphs = CompiledGraphs(torch._inductor.list_mode_options(MODES.get(str(value), "default"), dynamic=False))
    setup.state["compiled_graphs"] = graphs
    if value != "regional":
        setup.forward = torch.compile(setup.forward, dynamic=False, backend=graphs)
        return
    blocks = find_repeated(setup.model)
    if not blocks:
        raise PlanObstacleError("compile=regional: the model has no repeated blocks to compile; use compile true")
    # All blocks share one list of compiled versions; by default Dynamo gives up after 8, a ResNet has as many shapes.
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 2 * len(blocks))
    for block in blocks:
        block.compile(dynamic=False, backend=graphs)


def _is_regional(setup: Setup) -> bool:
    """Whether blocks of the model were compiled, and not the model as a whole."""
    is_compiled = "compiled_graphs" in setup.state and not hasattr(setup.forward, "_orig_mod")
    return is_compiled and any(getattr(m, "_compiled_call_impl", None) for m in setup.model.modules())


def _observe(setup: Setup) -> bool | str:
    """Read what was compiled, once a compiled graph has run; False before."""
    graphs = setup.state.get("compiled_graphs")
    if graphs is None or graphs.n_runs == 0:
        return False
    if _is_regional(setup):
        return "regional"
    if graphs.options.get("triton.cudagraphs"):
        return "reduce-overhead"
    return "max-autotune" if graphs.options.get("max_autotune") else True


def _report(setup: Setup) -> str | None:
    """Say how many graphs were compiled, in how long, and what had to be compiled more than once."""
    graphs: CompiledGraphs | None = setup.state.get("compiled_graphs")
    if graphs is None:
        return None
    if graphs.n_runs == 0:
        return "no compiled graph ran: the compiler declined the model, which trained in eager mode"
    from torch._dynamo.utils import counters, get_compilation_metrics

    events = [event for event in get_compilation_metrics() if (event.start_time or 0.0) >= graphs.began_s]
    seconds = sum(event.duration_us or 0 for event in events) / 1e6
    # Each is "0/0: tensor 'x' size mismatch at index 0. expected 4, actual 6", and may have more lines.
    found: list[str] = [event.recompile_reason.strip().splitlines()[0] for event in events if event.recompile_reason]
    reasons = [line.partition(": ")[2][:120] for line in found]
    text = f"{graphs.n_graphs} graphs compiled in {seconds:.1f} s, kept in {os.environ[CACHE_VARIABLE]}"
    if n_skipped := counters["inductor"]["cudagraph_skips"]:
        text += f", {n_skipped} of them without a CUDA graph (TORCH_LOGS=perf_hints says why)"
    if not reasons:
        return text
    shown = "; ".join(dict.fromkeys(reasons[:N_REASONS_SHOWN]))
    more = f", and {len(reasons) - N_REASONS_SHOWN} more" if len(reasons) > N_REASONS_SHOWN else ""
    return f"{text}; {len(reasons)} of them again for another shape or mode ({shown}{more}); drop_last spares the last"


def _candidates(facts: Facts) -> tuple[bool | str, ...]:
    """Offer it on a GPU only: on a CPU each trial compiles for 10 to 60 s, more than all the others take.

    max-autotune is left to who asks for it: it takes minutes a trial.
    """
    if facts.device_type != "cuda" or facts.has_c_compiler is False:
        return (False,)
    return (False, True, "reduce-overhead") if facts.n_ranks == 1 else (False, True)


LEVER = Lever(
    name="compile",
    key="speed.compile",
    aliases=("torch_compile",),
    type=Literal[False, True, "regional", "reduce-overhead", "max-autotune"],
    summary="Forward and backward are compiled by torch.compile with static shapes: whole, or block by block.",
    doc=(
        "Fuses element-wise work and drops Python overhead. On inference with AMP over 1,281 timm models on an RTX "
        "4090: median 1.57 times as fast (timm's published tables); training gains less. The first step takes from "
        "seconds to minutes, a batch of another size (the last of an epoch) compiles again, models with an LSTM are "
        "not compiled at all (pytorch/pytorch#141184). Random numbers and rounding differ from eager mode. regional "
        "compiles the repeated blocks (those that activation checkpointing wraps) and nothing around them: equal "
        "blocks share one graph, so the first step comes sooner (10.7 s became 2.0 s in huggingface/accelerate#3529). "
        "reduce-overhead also replays forward and backward as CUDA graphs, for steps that the host is too slow to "
        "launch: 2.7 times as fast as true on a resnet18 with images of 32 px, 1.04 times on a resnet50 with 224 px "
        "(A100, published by pytorch-autotune 2.0); it needs one device and accumulate 1, keeps memory of its own, and "
        "the end of a run says how many graphs went without. "
        "max-autotune also times variants of matrix products, for minutes. Compiled code is kept between runs. The "
        "end of a run says how many graphs were compiled, for how long, and why any was compiled again."
    ),
    trades=("speed", "memory", "numerics", "reproducibility"),
    stage="compile",
    restart=True,
    candidates=_candidates,
    obstacle=_find_obstacle,
    report=_report,
    apply=_apply,
    observe=_observe,
    complexity={False: 0.0, "regional": 2.5, True: 3.0, "reduce-overhead": 3.5, "max-autotune": 4.0}.__getitem__,
)
