"""Make an artefact of a configuration as it is, in eager fp32, so that it can be served. Imports torch when called."""

from collections.abc import Sequence
from pathlib import Path

from fulltilt.config import Config, inference_plan_of, parse_call
from fulltilt.engine.checkpoints.files import find_checkpoint
from fulltilt.errors import UsageError
from fulltilt.hardware import resolve_device
from fulltilt.infer.training import RESULTS, describe_training, find_training, run_training
from fulltilt.records.run_folder import RunFolder

FOLDER = "eager"


def prepare_eager(
    config: Config, out_dir: Path, words: Sequence[str], *, weights: str | None, n_threads: int | None
) -> Path:
    """Train the model where nothing has, build it, and return the folder of its artefact.

    Args:
        words: Arguments of ``fulltilt train``.
        weights: Folder of a training to take instead.

    Raises:
        UsageError: ``weights`` holds no checkpoint, or the training refused the configuration.
        TrainingError: it failed.
    """
    from fulltilt.infer.artefact import build_artefact
    from fulltilt.infer.gates.effect import EAGER
    from fulltilt.infer.model import build_inference_model

    if weights is not None and not find_checkpoint(Path(weights)):
        raise UsageError(f"--weights {weights} holds no checkpoint; name the folder of a training")
    parts = {"training": describe_training(config)}  # of infer check, so that both use one training
    with RunFolder(
        out_dir, fingerprint_parts=parts, command="infer check", results=RESULTS, aging=("training",)
    ) as held:
        trained = None if weights is None else Path(weights)
        if trained is None and ":" not in parse_call(config.task).name:
            trained = find_training(held.path) or run_training(words, held.path)
        device = resolve_device(str(config.run.device))
        model = build_inference_model(config, device=device, weights=trained)
        plan = {**inference_plan_of(config), **EAGER}
        if n_threads is not None:
            plan["threads"] = n_threads
        build_artefact(model, plan, held.path / FOLDER, name=config.run_name)
    return out_dir / FOLDER
