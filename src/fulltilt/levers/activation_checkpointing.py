"""activation_checkpointing: the model's blocks forget their activations and compute them again in the backward pass."""

import collections
import contextlib
import fnmatch
import functools
import math
from collections.abc import Iterator
from typing import Any

from fulltilt.errors import PlanObstacleError, TrainingError, format_nearest
from fulltilt.levers._spec import Lever, Setup

MARK = "_is_activation_checkpointed"
_NOTHING_TO_WRAP = (
    "the model has no repeated blocks and no chains of layers to wrap; use activation_checkpointing false"
)


def find_blocks(model: Any) -> list[Any]:
    """Find the modules that checkpointing wraps: repeated blocks, else Sequentials, which are run in segments."""
    return find_repeated(model) or _find_chains(model)


def find_repeated(model: Any) -> list[Any]:
    """Find modules with children whose class occurs at least twice (residual blocks, transformer layers).

    Those listed in a Sequential, ModuleList or ModuleDict come first; where none are listed, the outermost ones are
    taken. None lies inside another.
    """
    counts = collections.Counter(type(m) for m in model.modules())
    repeated = {id(m) for m in model.modules() if m is not model and counts[type(m)] > 1 and _is_block(m)}
    listed = {id(child) for m in model.modules() if _is_container(m) for child in m.children()}
    return _collect(model, repeated & listed, innermost=True) or _collect(model, repeated, innermost=False)


def find_named(model: Any, text: str) -> dict[str, Any]:
    """Find the modules that ``text`` names, "layer3, layer4" or "encoder.layers.*"; none lies inside another.

    Raises:
        PlanObstacleError: a name fits no module, or a module has no forward of its own.
    """
    named = {name: module for name, module in model.named_modules() if name}
    chosen: dict[str, Any] = {}
    for pattern in (part.strip() for part in text.split(",")):
        found = {name: module for name, module in named.items() if fnmatch.fnmatchcase(name, pattern)}
        if not found:
            outer = [name for name, _ in model.named_children()]
            raise PlanObstacleError(
                f"activation_checkpointing={text}: there is no module {pattern!r}; {format_nearest(pattern, outer)}"
            )
        chosen |= found
    outermost = {name: m for name, m in chosen.items() if not any(name.startswith(f"{other}.") for other in chosen)}
    for name, module in outermost.items():
        if not _is_wrappable(module) or type(module).__name__ in ("ModuleList", "ModuleDict"):
            raise PlanObstacleError(
                f"activation_checkpointing={text}: {name} is of type {type(module).__name__}, which has no forward to "
                f"wrap; name the modules inside it, {name}.*"
            )
    return outermost


def _is_container(module: Any) -> bool:
    from torch import nn

    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def _is_block(module: Any) -> bool:
    """Whether a module is worth wrapping: it has layers inside, weights, and a forward that a subclass can replace."""
    return (
        not _is_container(module)
        and next(module.children(), None) is not None
        and next(module.parameters(), None) is not None
        and _is_wrappable(module)
    )


def _is_wrappable(module: Any) -> bool:
    from torch import jit

    return "forward" not in vars(module) and not isinstance(module, jit.ScriptModule)


def _collect(module: Any, chosen: set[int], *, innermost: bool) -> list[Any]:
    """Collect chosen modules below ``module``, the outer one of nested ones.

    With ``innermost`` it is the inner ones where there are several (a stage of blocks).
    """
    found: dict[int, Any] = {}
    for child in module.children():
        inner = _collect(child, chosen, innermost=innermost)
        if id(child) in chosen and not (innermost and len(inner) > 1):
            inner = [child]
        found |= {id(block): block for block in inner}
    return list(found.values())


def _find_chains(model: Any) -> list[Any]:
    """Find the outermost Sequentials with weights; where they make a single segment, look inside them."""
    from torch import nn

    sequentials = {
        id(m)
        for m in model.modules()
        if isinstance(m, nn.Sequential) and len(m) > 1 and _is_wrappable(m) and next(m.parameters(), None) is not None
    }
    chains = [model] if id(model) in sequentials else _collect(model, sequentials, innermost=False)
    while chains and sum(_count_segments(chain) for chain in chains) < 2:
        chains = [inner for chain in chains for inner in _collect(chain, sequentials, innermost=False)]
    return chains


def _count_segments(module: Any) -> int:
    """Cut a chain of n layers into √n segments: the least memory for one recomputation (Chen et al. 2016)."""
    from torch import nn

    plain = type(module).forward is nn.Sequential.forward if isinstance(module, nn.Sequential) else False
    return max(1, round(math.sqrt(len(module)))) if plain else 1


@functools.cache
def _build_wrapped_class(base: Any, n_segments: int) -> Any:
    """Build the subclass that runs the forward of ``base`` under ``torch.utils.checkpoint``.

    A module that takes it as its class keeps parameter names, hooks and ``isinstance``, and a deep copy of the model
    computes with its own weights. Blocks of one class share it, so that they compile to one graph.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        if not torch.is_grad_enabled() or not getattr(self, MARK):
            return base.forward(self, *args, **kwargs)
        if n_segments == 1:
            return _run_checkpointed(self, lambda *a, **k: base.forward(self, *a, **k), args, kwargs)
        return _run_in_segments(self, n_segments, *args, **kwargs)

    members = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__, MARK: True}
    return type(base.__name__, (base,), members)


def _run_in_segments(chain: Any, n_segments: int, x: Any) -> Any:
    for segment in _cut(list(chain), n_segments):
        x = _run_checkpointed(chain, functools.partial(_run_layers, segment), (x,), {})
    return x


def _run_layers(layers: list[Any], x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def _cut(layers: list[Any], n_segments: int) -> list[list[Any]]:
    """Cut layers into segments of equal length, none of which starts with a layer that overwrites its input."""
    size = math.ceil(len(layers) / n_segments)
    segments: list[list[Any]] = []
    for layer in layers:
        if not segments or (len(segments[-1]) >= size and not getattr(layer, "inplace", False)):
            segments.append([])
        segments[-1].append(layer)
    return segments


def _run_checkpointed(module: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    import torch
    from torch.utils.checkpoint import checkpoint

    if torch.compiler.is_compiling():
        # The compiler recomputes operators, not the module: buffers are written once anyway.
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    kept, kept_by_name = _copy_containers(args), _copy_containers(kwargs)
    given = [value for value in (*kept, *kept_by_name.values()) if isinstance(value, torch.Tensor)]
    versions = [tensor._version for tensor in given]
    outputs = checkpoint(
        function,
        *kept,
        use_reentrant=False,
        context_fn=lambda: (contextlib.nullcontext(), _norms_held(module)),
        **kept_by_name,
    )
    if any(tensor._version != version for tensor, version in zip(given, versions, strict=True)):
        raise TrainingError(
            f"activation_checkpointing: {type(module).__name__} changes its input in place; computed again it would "
            "start from the changed one; use inplace=False there, or activation_checkpointing false"
        )
    return outputs


def _copy_containers(value: Any) -> Any:
    """Copy lists and dicts, not tensors: a caller may go on filling the list it passed (DenseNet does)."""
    if type(value) in (list, tuple):
        return type(value)(_copy_containers(item) for item in value)
    if type(value) is dict:
        return {key: _copy_containers(item) for key, item in value.items()}
    return value


@contextlib.contextmanager
def _norms_held(module: Any) -> Iterator[None]:
    """Keep running statistics of BatchNorm and InstanceNorm as the first forward left them while it is repeated."""
    from torch.nn.modules.batchnorm import _NormBase

    # Momentum 0 leaves the statistics; without tracking, fewer tensors would be saved than in the first forward, which
    # checkpoint checks.
    norms = [m for m in module.modules() if isinstance(m, _NormBase) and m.training and m.track_running_stats]
    held = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, momentum, count in held:
            norm.momentum, norm.num_batches_tracked = momentum, count


def count_blocks(model: Any) -> int:
    """Count the blocks and chain segments that the lever would run under checkpointing."""
    return sum(_count_segments(block) for block in find_blocks(model))


def _apply(setup: Setup, value: bool | str) -> None:
    if not value:
        return
    blocks = list(find_named(setup.model, value).values()) if isinstance(value, str) else find_blocks(setup.model)
    setup.state["checkpointed"] = value
    if not blocks:
        raise PlanObstacleError(f"activation_checkpointing=True: {_NOTHING_TO_WRAP}")
    for block in blocks:
        block.__class__ = _build_wrapped_class(type(block), _count_segments(block))


def count_wrapped(model: Any) -> int:
    """Count the modules that run under checkpointing."""
    return sum(hasattr(type(m), MARK) for m in model.modules())


def _observe(setup: Setup) -> bool | str:
    """Read what was asked for, where the modules it names are those that are wrapped."""
    n_wrapped, value = count_wrapped(setup.model), setup.state.get("checkpointed")
    if isinstance(value, str) and n_wrapped == len(find_named(setup.model, value)):
        return value
    return n_wrapped > 0


@contextlib.contextmanager
def without_checkpointing(model: Any) -> Iterator[None]:
    """Run wrapped blocks as if they were not, for counts that leave recomputation out."""
    wrapped = [type(m) for m in model.modules() if hasattr(type(m), MARK)]
    for cls in wrapped:
        setattr(cls, MARK, False)
    try:
        yield
    finally:
        for cls in wrapped:
            setattr(cls, MARK, True)


LEVER = Lever(
    name="activation_checkpointing",
    key="speed.activation_checkpointing",
    aliases=("gradient_checkpointing",),
    type=bool | str,
    summary="Blocks of the model forget their activations and compute them again in the backward pass.",
    doc=(
        "Trades a second forward of the wrapped blocks (about a third more compute) for the memory of their inner "
        "activations; that pays when the memory allows a larger batch that fills the device better, or the model "
        "does not fit at all. A residual network of 1,000 layers went from 48 to 7 GB for 30 % more time (Chen et "
        "al. 2016, arXiv:1604.06174). Gradients, dropout masks and the running statistics of BatchNorm and "
        "InstanceNorm are those of the plain run. A module that changes other buffers of its own in forward (the "
        "power iteration of spectral norm) changes them twice. true wraps the repeated blocks of any model; names of "
        "modules choose: layer3, or several in one text, 'layer3, layer4', 'encoder.layers.*'."
    ),
    trades=("speed", "memory"),
    stage="model",
    restart=True,
    candidates=lambda facts: (False, True) if facts.n_checkpointable != 0 else (False,),
    obstacle=lambda value, plan, facts: _NOTHING_TO_WRAP if value is True and facts.n_checkpointable == 0 else None,
    apply=_apply,
    observe=_observe,
    complexity=lambda value: 2.0 * bool(value),
)
