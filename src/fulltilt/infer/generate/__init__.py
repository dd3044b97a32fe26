"""Text that is written word by word: decoding with a cache, its measurement, and its service."""

from fulltilt.config import parse_call
from fulltilt.infer.manifest import Manifest


def may_write_text(manifest: Manifest) -> bool:
    """Say whether only a look at the model, which takes torch, tells if it writes text."""
    named = manifest.config.get("config", {}).get("task")
    task = parse_call(named).name if named else ""
    return task == "generation" or (":" in task and manifest.plan.get("engine") != "onnx")
