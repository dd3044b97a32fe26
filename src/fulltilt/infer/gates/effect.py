"""Prove that an optimisation really ran: its kernels were seen, nothing compiled anew, and it is faster than eager.

Settings without an effect are common and silent: a wrapper that calls go around, int8 that computes in fp32, a format
that the hardware emulates, graphs that are recorded anew at every request, an option under a wrong name.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fulltilt.infer.joining import Sample
from fulltilt.levers import Facts
from fulltilt.stats import Block, Comparison, alternate, run_group

EAGER = {"engine": "eager", "quantization": "none", "attention": "auto", "cuda_graphs": False, "precision": "fp32"}
"""The plan that the others are held against, but for threads."""

LIMIT_S, N_GROUPS = 4.0, 16  # of a comparison

EXPECTED = {
    ("onnx", "int8"): ("MatMulInteger", "DynamicQuantize"),
    ("eager", "int8"): ("quantized::linear", "quantized_lstm", "quantized_gru"),
    ("compile", "int8"): ("_int_mm", "int8_gemm", "onednn::qlinear"),
    ("aot", "int8_weights"): ("int8pack_mm",),
    ("aot", "int4_weights"): ("int4",),
}
"""(engine, quantization) → operators, one of which has to be among those that ran.

Of weights alone in eager and compile, the layers themselves are read back; they are converted as they are multiplied.
"""


def is_eager(plan: Mapping[str, Any]) -> bool:
    return {**plan, **EAGER} == plan


class _Arm:
    """Answers all batches in each turn; a block lasts their geometric mean, so each counts alike."""

    def __init__(self, answer: Callable[[Sample], Any], batches: Sequence[Sample], clock: Callable[[], float]):
        self._answer, self._batches, self._clock = answer, batches, clock

    def run_block(self) -> Block:
        ends_s = [self._clock()]
        for batch in self._batches:
            self._answer(batch)
            ends_s.append(self._clock())
        times_s = [max(end_s - begin_s, 1e-9) for begin_s, end_s in itertools.pairwise(ends_s)]
        return Block(n_samples=1, seconds=statistics.geometric_mean(times_s))


def compare_speed(
    base: Callable[[Sample], Any],
    other: Callable[[Sample], Any],
    batches: Sequence[Sample],
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Compare two runners in turns within this process, until that decides or the time is over."""
    arms = {"base": _Arm(base, batches, clock), "other": _Arm(other, batches, clock)}
    for arm in arms.values():
        arm.run_block()  # warms it up
    evidence = alternate(
        lambda: run_group(arms, seconds=limit_s / N_GROUPS, clock=clock), "base", "other", limit_s=limit_s, clock=clock
    )
    return evidence.compare("base", "other")


def format_gain(gain: Comparison) -> str:
    low, high = (1 + bound_pct / 100 for bound_pct in gain.ci_pct)
    return f"{gain.speedup:.2f} times as fast as eager fp32 in turns ({low:.2f} to {high:.2f})"


def judge_effect(
    plan: Mapping[str, Any],
    facts: Facts,
    *,
    operators: Sequence[str],
    n_builds: int,
    n_graph_runs: int | None,
    gain: Comparison | None,
) -> list[str]:
    """Say what of a plan had no effect; empty where all of it had.

    Args:
        operators: Names of what ran, as the profiler of torch or of the session has them.
        n_builds: Graphs that were compiled or recorded after the warm-up, within the declared shapes.
        n_graph_runs: Runs of compiled graphs; None: the engine has none of its own.
        gain: Over eager fp32, in turns; None: it is eager fp32.
    """
    failures, quantization = list[str](), plan["quantization"]
    expected = EXPECTED.get((plan["engine"], quantization), ())
    if expected and not any(word in name for name in operators for word in expected):
        seen = ", ".join([name for name in operators if "mm" in name.lower() or "linear" in name][:4]) or "none"
        failures.append(
            f"quantization {quantization} did not run: products were {seen}; expected one of {', '.join(expected)}"
        )
    if (attention := plan["attention"]) != "auto":
        ran = [name for name in ("flash", "efficient") if any(f"{name}_attention" in each for each in operators)]
        if ran != [name for name in (attention,) if name != "math"]:
            failures.append(f"attention {attention} did not run: the kernel was {' and '.join(ran) or 'another'}")
    if n_graph_runs == 0:
        failures.append("no compiled graph ran: calls go around it, in eager mode")
    if n_builds:
        failures.append(f"{n_builds} graphs were built anew within the declared shapes; use another engine")
    if plan["precision"] == "bf16" and facts.device_type == "cpu" and facts.has_native_bf16 is False:
        failures.append("bf16 is emulated: this CPU has no bf16 arithmetic")
    if gain is not None and gain.verdict != "faster":
        failures.append(f"no gain is proven, it is {format_gain(gain)}")
    return [f"effect: {failure}" for failure in failures]
