"""Build one candidate and hold it against eager fp32, in a process of its own (``run_measuring``). Imports torch.

The request is ``{"config", "base_dir", "provenance", "device", "weights", "plan", "folder", "name"}``, the answer
``{"measured": {"manifest": …, "failures": […]}}``; the evidence lies in the folder.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt.config import config_from_values
from fulltilt.infer.artefact import (
    EVIDENCE,
    Artefact,
    build_artefact,
    build_eager_plan,
    open_artefact,
    open_eager,
    write_manifest,
)
from fulltilt.infer.gates.accuracy import (
    compare_outputs,
    compute_changed_labels_pct,
    compute_metric_drop,
    judge_accuracy,
)
from fulltilt.infer.gates.effect import Effect, judge_effect
from fulltilt.infer.gates.turns import measure_speed_up
from fulltilt.infer.joining import Sample, join_samples, read_length
from fulltilt.infer.manifest import Accuracy, Manifest
from fulltilt.infer.model import InferenceModel, build_inference_model
from fulltilt.records import dumps, encode
from fulltilt.records.run_folder import write_atomic
from fulltilt.tuner.trials.measuring import Answer

BATCH = 16  # samples of a batch that is judged
REFERENCE_S = 10.0  # at most for the answers of eager fp32, which every candidate is held against
MIN_JUDGED = 64
SPEED_S = 4.0


def run(message: Mapping[str, Any], send: Answer) -> None:
    """Build and judge the candidate that ``message`` asks for.

    Raises:
        FulltiltError: it cannot be built. Errors of the user's code pass through.
    """
    message = message["given"]
    config = config_from_values(message["config"], base_dir=message["base_dir"], provenance=message["provenance"])
    weights = Path(message["weights"]) if message.get("weights") else None
    model = build_inference_model(config, device=message["device"], weights=weights)
    send({"progress": {"done": 1, "total": 3}})
    folder = Path(message["folder"])
    build_artefact(model, message["plan"], folder, name=message["name"])
    send({"progress": {"done": 2, "total": 3}})
    manifest, failures = judge_candidate(model, folder)
    send({"measured": {"manifest": encode(manifest), "failures": failures}})


def judge_candidate(model: InferenceModel, folder: Path) -> tuple[Manifest, list[str]]:
    """Open an artefact as a service would, measure it, and write accuracy and evidence beside it."""
    begin_s = time.perf_counter()
    artefact = open_artefact(folder)
    n_builds = artefact.runner.n_builds
    artefact.answer(artefact.samples[:1])
    first_s = time.perf_counter() - begin_s
    if artefact.is_fallback:
        return artefact.manifest, list(artefact.notes)
    limits = model.config.inference
    accuracy = measure_accuracy(model, artefact)
    failures = judge_accuracy(accuracy, min_sqnr_db=limits.min_sqnr_db, max_metric_drop_pct=limits.max_metric_drop_pct)
    effect = measure_effect(artefact, n_builds=n_builds, first_answer_s=first_s)
    failures += judge_effect(artefact.plan, effect, model.facts)
    write_atomic(
        folder / EVIDENCE, dumps({"effect": effect, "failures": failures, "notes": model.notes}, indent=1) + "\n"
    )
    return write_manifest(folder, dataclasses.replace(artefact.manifest, accuracy=accuracy)), failures


def measure_accuracy(model: InferenceModel, artefact: Artefact) -> Accuracy:
    """Answer real samples of all lengths, the shortest and the longest alone, by both, and compare."""
    order = sorted(range(len(model.samples)), key=lambda i: read_length(model.samples[i], model.inputs))
    ends = [order[0], order[-1]]
    begin_s, chosen, reference, here = time.perf_counter(), [], [], []
    for i in range(0, len(model.samples), BATCH):
        numbers = list(range(i, min(i + BATCH, len(model.samples))))
        for group in [[n] for n in ends] * (i == 0) + [numbers]:
            samples = [model.samples[n] for n in group]
            alone = [[sample] for sample in samples] if model.joins != "pad" else [samples]
            reference += [outputs for part in alone for outputs in model.answer(part)]
            here += artefact.answer(samples)
            chosen += group
        if len(chosen) >= MIN_JUDGED and time.perf_counter() - begin_s > REFERENCE_S:
            break
    sqnr_db, largest = compare_outputs(reference, here)
    name, fp32, ours, drop = _measure_metric(model, chosen, reference, here)
    return Accuracy(
        sqnr_db=sqnr_db,
        max_abs_error=largest,
        n_samples=len(set(chosen)),
        changed_labels_pct=compute_changed_labels_pct(reference, here) if name and "accuracy" in name else None,
        metric=name,
        metric_fp32=fp32,
        metric_here=ours,
        metric_drop_ci95=drop,
    )


def _measure_metric(
    model: InferenceModel, chosen: list[int], reference: list[Sample], here: list[Sample]
) -> tuple[str | None, float | None, float | None, tuple[float, float] | None]:
    if not model.workload.metrics or len(chosen) < 2:
        return None, None, None, None
    name, metric = next(iter(model.workload.metrics.items()))
    values = [
        [
            float(metric(model.rebuild(outputs), _to_cpu(model.targets[i])).float().mean())
            for i, outputs in zip(chosen, answers, strict=True)
        ]
        for answers in (reference, here)
    ]
    return name, *compute_metric_drop(name, *values)


def _to_cpu(targets: Any) -> Any:
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    return tree_map_only(Tensor, lambda tensor: tensor.cpu(), targets)


def measure_effect(artefact: Artefact, *, n_builds: int, first_answer_s: float | None = None) -> Effect:
    """Watch a candidate over the declared shapes, and measure it against eager fp32 in turns.

    Args:
        n_builds: Graphs that were there when it was opened; each further one is one too many.
    """
    shapes = list_shapes(artefact)
    runner = artefact.runner
    for inputs in shapes:
        runner(inputs)
    n_new = runner.n_builds - n_builds
    operators = runner.list_operators(shapes[0])
    observed = runner.read_levers()
    speed = None
    if artefact.plan != build_eager_plan(artefact.plan):
        eager = open_eager(artefact.folder, artefact.manifest)
        speed = measure_speed_up(eager, runner, shapes, limit_s=SPEED_S)
    return Effect(
        observed=observed,
        operators=operators,
        n_builds=n_new,
        n_graph_runs=runner.n_graph_runs,
        speed_up=speed and speed[0],
        speed_up_ci=speed and speed[1:],
        first_answer_s=first_answer_s,
    )


def list_shapes(artefact: Artefact, sizes: tuple[int, ...] = (1, 3, 8)) -> list[Sample]:
    """List batches over the declared shapes: of a few sizes, with the shortest, the middle and the longest samples."""
    manifest = artefact.manifest
    ordered = sorted(artefact.samples, key=lambda sample: read_length(sample, manifest.inputs))
    n = len(ordered)
    starts = sorted({0, n // 2, n - 1}) if manifest.max_length else [0]
    sizes = sizes if manifest.joins == "pad" else (1,)
    groups = [
        [ordered[min(start, n - 1 - k) if start else min(k, n - 1)] for k in range(size)]
        for start in starts
        for size in sizes
    ]
    return [join_samples(group, manifest.inputs) for group in groups]
