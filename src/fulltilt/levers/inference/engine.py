"""engine: what executes the model."""

from typing import Any, Literal

from fulltilt.levers._spec import Facts, Lever, PlanValues, Setup, note_choice

ENGINES = ("eager", "compile", "aot", "onnx")
_PACKAGES = {"onnx": ("onnxruntime", "onnx", "onnxscript")}


def _candidates(facts: Facts) -> tuple[str, ...]:
    """Offer ONNX Runtime on the CPU only: the package of the extra has no kernels for a GPU."""
    return tuple(name for name in ENGINES if _find_obstacle(name, {}, facts) is None)


def _find_obstacle(value: str, plan: PlanValues, facts: Facts) -> str | None:
    if value in ("compile", "aot") and facts.has_c_compiler is False:
        return "it builds code with a C++ compiler and none was found; install g++, or use engine onnx"
    if value == "onnx" and facts.device_type != "cpu":
        return "ONNX Runtime as it is installed here computes on the CPU; use engine aot, or run.device cpu"
    missing = [name for name in _PACKAGES.get(value, ()) if facts.packages is not None and name not in facts.packages]
    return f"needs {', '.join(missing)}; pip install 'fulltilt[infer]'" if missing else None


def _observe(setup: Setup) -> Any:
    return setup.state.get("engine", "eager")


LEVER = Lever(
    name="engine",
    key="inference.engine",
    type=Literal["eager", "compile", "aot", "onnx"],
    default="eager",
    summary="What executes the model: eager PyTorch, torch.compile, an AOTInductor package, or ONNX Runtime.",
    doc=(
        "Which one is fastest depends on model, shape and machine. On a CPU with AVX2, one thread, an encoder of "
        "MiniLM's size and random weights over eager fp32: ONNX Runtime 1.50 times as fast with 32 tokens, 1.06 with "
        "128, 0.90 with 8 × 128; AOTInductor 1.33, 1.11 and 1.02; with int8 ONNX Runtime 2.87, 1.80 and 1.44. "
        "compile builds its code at every start (16 to 37 s there). aot builds it once (26 to 48 s) and loads it; its "
        "package belongs to one version of torch and one instruction set. An ONNX artefact answers without torch. "
        "All three are built for every batch size and length up to those that were declared; what is slower than "
        "eager, or compiles anew within them, is refused by name."
    ),
    trades=("speed", "memory", "numerics"),
    stage="compile",
    restart=True,
    candidates=_candidates,
    obstacle=_find_obstacle,
    apply=note_choice("engine"),
    observe=_observe,
    complexity=lambda value: float(ENGINES.index(value)),
)
