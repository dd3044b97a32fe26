"""Make an artefact of a configuration in eager mode, so that it can be served. Imports torch when called."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fulltilt.config import Config, inference_plan_of
from fulltilt.infer.check import open_check_folder, plan_check, prepare_weights
from fulltilt.infer.manifest import Policy
from fulltilt.levers.precision import resolve

POLICY = Policy(max_batch=8)  # nobody has measured another


def prepare_eager(config: Config, out_dir: Path, words: Sequence[str], *, weights: str | None) -> Path:
    """Train the model as ``infer check`` does, unless it has; build it, and return the folder of its artefact.

    Args:
        words: Arguments of ``fulltilt train``.
        weights: Folder of a training to take instead.
    """
    from fulltilt.infer.artefact import build_artefact, write_manifest
    from fulltilt.infer.model import build_inference_model

    checked, folder = plan_check(config, weights=weights, needs_targets=False), out_dir / "eager"
    with open_check_folder(checked, out_dir) as held:
        trained, _ = prepare_weights(checked, held, words)
        model = build_inference_model(config, device=checked.device, weights=trained)
        plan = inference_plan_of(config)
        precision, _ = resolve(plan["precision"], model.facts)  # and the rest as ``check`` measures it
        plan = plan.replace(engine="eager", cuda_graphs=False, precision=precision)
        manifest = build_artefact(model, plan, folder, name=config.run_name)
        write_manifest(folder, dataclasses.replace(manifest, policy=POLICY))
    return folder
