"""Prove that an optimisation really ran: its kernels were seen, nothing compiled anew, and it is faster than eager.

Settings without an effect are common and silent: a wrapper that calls go around, int8 that computes in fp32, a format
that the hardware emulates, graphs that are recorded anew at every request, an option under a wrong name.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fulltilt.levers import Facts
from fulltilt.stats.alternation import WORTH_PCT

EAGER = {"engine": "eager", "quantization": "none", "attention": "auto", "cuda_graphs": False, "precision": "fp32"}
"""The plan that the others are held against, but for threads."""

EXPECTED = {
    ("onnx", "int8"): ("MatMulInteger", "DynamicQuantize"),
    ("eager", "int8"): (
        "quantized::linear_dynamic",
        "quantized::linear_relu_dynamic",
        "quantized_lstm",
        "quantized_gru",
    ),
    ("compile", "int8"): ("_int_mm", "int8_gemm", "onednn::qlinear"),
    ("aot", "int8_weights"): ("int8pack_mm",),
    ("aot", "int4_weights"): ("int4",),
}
"""(engine, quantization) → operators, one of which has to be among those that ran.

Of weights alone in eager and compile, the layers themselves are read back; they are converted as they are multiplied.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """What was seen of a candidate at work, on the declared shapes.

    Attributes:
        observed: Levers as they were read back from the runner.
        operators: Names of what ran, as the profiler of torch or of the session has them.
        n_builds: Graphs that were compiled or recorded after the warm-up.
        n_graph_runs: Runs of compiled graphs; None: the engine has none of its own.
        speed_up_ci: 98 % interval of how many times as fast as eager fp32 it is, in turns; None: it is eager fp32.
    """

    observed: dict[str, Any]
    operators: tuple[str, ...]
    n_builds: int
    n_graph_runs: int | None
    speed_up: float | None = None
    speed_up_ci: tuple[float, float] | None = None
    first_answer_s: float | None = None


def is_eager(plan: Mapping[str, Any]) -> bool:
    return all(plan.get(name, value) == value for name, value in EAGER.items())


def judge_effect(plan: Mapping[str, Any], effect: Effect, facts: Facts) -> list[str]:
    """Say what of a plan had no effect; empty where all of it had."""
    failures = [
        f"{name} {plan[name]} is not in force, {seen} is"
        for name, seen in effect.observed.items()
        if plan.get(name) is not None and seen != plan[name]
    ]
    failures += _judge_kernels(plan, effect)
    if effect.n_graph_runs == 0:
        failures.append("no compiled graph ran: calls go around it, in eager mode")
    if effect.n_builds:
        failures.append(
            f"{effect.n_builds} graphs were compiled or recorded anew within the declared shapes; "
            "pad lengths to a multiple, or use another engine"
        )
    if plan.get("precision") == "bf16" and facts.device_type == "cpu" and facts.has_native_bf16 is False:
        failures.append("bf16 is emulated: this CPU has no bf16 arithmetic")
    if effect.speed_up_ci is not None and not is_eager(plan):
        failures += judge_speed(effect.speed_up_ci)
    return [f"effect: {failure}" for failure in failures]


def judge_speed(speed_up_ci: tuple[float, float]) -> list[str]:
    """Say that no gain over eager was proven; empty where one was."""
    low, high = speed_up_ci
    if low > 1 + WORTH_PCT / 100:
        return []
    verdict = "slower than" if high < 1 else "no faster than"
    return [f"{verdict} eager fp32 in turns: {low:.2f} to {high:.2f} times as fast"]


def _judge_kernels(plan: Mapping[str, Any], effect: Effect) -> list[str]:
    engine, quantization = plan.get("engine", "eager"), plan.get("quantization", "none")
    expected = EXPECTED.get((engine, quantization), ())
    if not expected or any(word in name for name in effect.operators for word in expected):
        return []
    seen = ", ".join([name for name in effect.operators if "mm" in name.lower() or "linear" in name][:4]) or "none"
    return [
        f"quantization {quantization} did not run: no operator is one of {', '.join(expected)}; products were {seen}"
    ]
