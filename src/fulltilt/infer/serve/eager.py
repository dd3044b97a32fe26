"""Make an artefact of a configuration in eager mode, so that it can be served. Imports torch when called."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fulltilt.config import Config, inference_plan_of
from fulltilt.errors import UsageError
from fulltilt.infer.artefact import MANIFEST, Artefact, build_artefact, write_manifest
from fulltilt.infer.check import open_check_folder, plan_check, prepare_weights
from fulltilt.infer.gates.accuracy import judge_accuracy
from fulltilt.infer.gates.effect import is_eager
from fulltilt.infer.manifest import Policy
from fulltilt.levers.precision import resolve

POLICY = Policy(max_batch=8)  # nobody has measured another


def prepare_eager(
    config: Config, out_dir: Path, words: Sequence[str], *, weights: str | None, n_threads: int | None = None
) -> Artefact:
    """Train the model as ``infer check`` does, unless it has; build its artefact, and return it open.

    Args:
        words: Arguments of ``fulltilt train``.
        weights: Folder of a training to take instead.
        n_threads: Of one operator; None: what the configuration says.

    Raises:
        UsageError: its answers are further from those of eager fp32 than the configuration allows.
    """
    from fulltilt.infer.building import measure_accuracy
    from fulltilt.infer.model import build_inference_model

    checked, folder = plan_check(config, weights=weights, needs_targets=False), out_dir / "eager"
    with open_check_folder(checked, out_dir) as held:
        trained, _ = prepare_weights(checked, held, words)
        model, limits = build_inference_model(config, device=checked.device, weights=trained), config.inference
        plan = inference_plan_of(config).replace(engine="eager", cuda_graphs=False)
        precision, _ = resolve(plan["precision"], model.facts)  # and the rest as ``check`` measures it
        plan = plan.replace(precision=precision, threads=n_threads or plan["threads"])
        artefact = build_artefact(model, plan, folder, name=config.run_name)
        manifest = dataclasses.replace(artefact.manifest, policy=POLICY)
        if not is_eager(plan):
            manifest = dataclasses.replace(manifest, accuracy=(found := measure_accuracy(model, artefact)))
            if failures := judge_accuracy(found, limits.min_sqnr_db, limits.max_metric_drop_pct):
                (folder / MANIFEST).unlink()
                raise UsageError("; ".join(failures))
        artefact.manifest = write_manifest(folder, manifest)
    return artefact
