"""compile: the forward and backward graphs are compiled by torch.compile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fulltilt.levers._spec import Facts, Lever, Setup


@dataclasses.dataclass(slots=True)
class CompiledGraphs:
    """A backend for torch.compile: Inductor, with a count of the runs of its graphs.

    A model that Dynamo declines (an LSTM) trains in eager mode without a word: only the runs tell.
    """

    n_runs: int = 0

    def __call__(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(graph, example_inputs)

        def run(*args: Any) -> Any:
            self.n_runs += 1
            return compiled(*args)

        return run


def _guard(value: bool, plan: Mapping[str, Any], facts: Facts) -> str | None:
    if value and facts.has_c_compiler is False:
        return "torch.compile needs a C++ compiler and none was found; install g++, or use compile false"
    return None


def _apply(setup: Setup, value: bool) -> None:
    setup.forward = setup.forward or setup.model  # over several devices what joins them is around the model already
    if not value:
        return
    import torch

    graphs = CompiledGraphs()
    setup.state["compiled_graphs"] = graphs
    setup.forward = torch.compile(setup.forward, dynamic=False, backend=graphs)


def _observe(setup: Setup) -> bool:
    """True once a compiled graph has run."""
    graphs = setup.state.get("compiled_graphs")
    return graphs is not None and graphs.n_runs > 0


def _candidates(facts: Facts) -> tuple[bool, ...]:
    """On a CPU it has to be asked for: each trial compiles anew for 10 to 60 s, more than all the others take."""
    return (False, True) if facts.device_type == "cuda" and facts.has_c_compiler is not False else (False,)


LEVER = Lever(
    name="compile",
    key="speed.compile",
    aliases=("torch_compile",),
    type=bool,
    default=False,
    summary="Forward and backward are compiled by torch.compile with static shapes.",
    doc=(
        "Fuses element-wise work and drops Python overhead. On inference with AMP over 1,281 timm models on an RTX "
        "4090: median 1.57 times as fast (timm's published tables); training gains less. The first step takes from "
        "seconds to minutes, a batch of another size (the last of an epoch) compiles again, models with an LSTM are "
        "not compiled at all (pytorch/pytorch#141184). Random numbers and rounding differ from eager mode."
    ),
    trades=("speed", "memory", "numerics", "reproducibility"),
    stage="compile",
    restart=True,
    candidates=_candidates,
    guard=_guard,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: 3.0 * value,
)
