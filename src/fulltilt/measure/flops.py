"""Count the floating-point operations of one training step, and how much of the step the count covers.

Operators without a formula count as nothing (a recurrent network comes out at zero), so the coverage says for how many
calls of arithmetic operators the FLOPs are known.

A multiply-add is 2 FLOPs; causal attention counts as full attention; what activation checkpointing recomputes counts
again. Elementwise operations, norms, pooling and look-ups count neither as FLOPs nor in the coverage.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# Names of operators that do a network's arithmetic. One that matches and has no formula is reported as uncovered.
_COMPUTE_WORDS = re.compile(
    r"rnn|lstm|gru|conv(?!ert)|matmul|linear|attention|transformer|einsum|cdist|bilinear|fft|linalg_|_solve|cholesky"
    r"|(^|_)(mm|bmm|mv|dot|vdot|ger|gemm)($|_)|(^|_)add(mm|mv|r|bmm)($|_)|baddbmm"
)
_NOT_COMPUTE = re.compile(r"upsample|pad|weight_norm|rnn_flatten|_norm$|fftshift")
_KNOWN_NAMESPACES = frozenset({"aten", "prim", "prims", "_c10d_functional", "c10d", "profiler", "debugprims"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Flops:
    """FLOPs of one call."""

    total: int  # those that are known
    coverage_pct: float | None  # share of arithmetic calls whose FLOPs are known; None when there were none
    uncovered: dict[str, int]  # calls without a formula, by operator


class _CallCounter(TorchDispatchMode):
    """Sees every operator below autograd, after composite ones were taken apart."""

    def __init__(self, known: frozenset[Any]):
        super().__init__()
        self._known = known
        self.n_known = 0
        self.uncovered: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = getattr(func, "_overloadpacket", func)
        if packet in self._known:
            self.n_known += 1
        elif bears_compute(str(packet)):
            self.uncovered[str(packet)] += 1
        return func(*args, **(kwargs or {}))


def count_flops(fn: Callable[[], Any]) -> Flops:
    """Run ``fn`` once and count: a forward pass, a backward pass, or a whole step.

    What ``fn`` does stays done: gradients are written and optimizers step. Count the model itself, not its compiled
    form: kernels that a compiler fused are no operators any more.

    **Device**: does not synchronise. Cost: the call itself and some 20 µs per operator.
    """
    formulas = _build_missing_formulas()
    calls = _CallCounter(frozenset(flop_registry) | frozenset(formulas))
    flops = FlopCounterMode(display=False, custom_mapping=formulas)
    with calls, flops:  # the counter of calls outside: it sees what the other one has taken apart
        fn()
    n_uncovered = sum(calls.uncovered.values())
    n_calls = calls.n_known + n_uncovered
    return Flops(
        total=int(flops.get_total_flops()),
        coverage_pct=100 * calls.n_known / n_calls if n_calls else None,
        uncovered=dict(calls.uncovered),
    )


def bears_compute(operator: str) -> bool:
    """Whether an operator (``aten.mkldnn_rnn_layer``) does arithmetic; one from outside of torch counts as such."""
    namespace, _, name = operator.rpartition(".")
    if namespace not in _KNOWN_NAMESPACES:
        return True
    return bool(_COMPUTE_WORDS.search(name)) and not _NOT_COMPUTE.search(name)


def _build_missing_formulas() -> dict[Any, Any]:
    """Build formulas over shapes that torch's counter lacks: attention on a CPU, and products with a vector."""
    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
        aten.mv: lambda matrix, *_, **__: 2 * math.prod(matrix),
        aten.addmv: lambda bias, matrix, *_, **__: 2 * math.prod(matrix),
        aten.dot: lambda vector, *_, **__: 2 * math.prod(vector),
    }
    return {packet: formula for packet, formula in formulas.items() if packet not in flop_registry}
