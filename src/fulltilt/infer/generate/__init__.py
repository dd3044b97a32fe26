"""Text that is written word by word: decoding with a cache, its measurement, and its service."""

from typing import Any

from fulltilt.config import parse_call


def may_write_text(manifest: Any) -> bool:
    """Whether the model of an artefact has to be looked at, which takes torch, to know that it writes text."""
    task = parse_call(manifest.config["config"]["task"]).name
    return task == "generation" or (":" in task and manifest.plan["engine"] != "onnx")
