"""Build one candidate and hold it against eager fp32, in a process of its own (``run_measuring``). Imports torch.

The request is ``{"config", "base_dir", "provenance", "device", "weights", "plan", "folder", "name"}``, the answer
``{"measured": {"manifest": …, "failures": […], "facts": …}}``; the evidence lies in the folder.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fulltilt.config import config_from_values
from fulltilt.infer.artefact import EVIDENCE, Artefact, build_artefact, open_artefact, open_eager, write_manifest
from fulltilt.infer.gates.accuracy import (
    compare_outputs,
    compute_changed_labels_pct,
    compute_metric_drop,
    judge_accuracy,
)
from fulltilt.infer.gates.effect import compare_speed, is_eager, judge_effect
from fulltilt.infer.joining import Sample, read_length
from fulltilt.infer.manifest import Accuracy, Manifest
from fulltilt.infer.model import InferenceModel, build_inference_model
from fulltilt.records import dumps, encode
from fulltilt.records.run_folder import write_atomic
from fulltilt.tuner.trials.measuring import Answer

BATCH = 16  # samples of a batch that is judged
REFERENCE_S = 10.0  # at most for the answers of eager fp32, which every candidate is held against
MIN_JUDGED = 64


def run(message: Mapping[str, Any], send: Answer) -> None:
    """Build and judge the candidate that ``message`` asks for.

    Raises:
        FulltiltError: it cannot be built. Errors of the user's code pass through.
    """
    given = message["given"]
    config = config_from_values(given["config"], base_dir=given["base_dir"], provenance=given["provenance"])
    weights = Path(given["weights"]) if given["weights"] else None
    model = build_inference_model(config, device=given["device"], weights=weights)
    folder = Path(given["folder"])
    build_artefact(model, given["plan"], folder, name=given["name"])
    manifest, failures = judge_candidate(model, folder)
    send({"measured": {"manifest": encode(manifest), "failures": failures, "facts": encode(model.facts)}})


def judge_candidate(model: InferenceModel, folder: Path) -> tuple[Manifest, list[str]]:
    """Open an artefact as a service would, measure it, and write accuracy and evidence beside it."""
    artefact, limits = open_artefact(folder), model.config.inference
    if artefact.notes:
        return artefact.manifest, list(artefact.notes)
    effect = measure_effect(artefact)
    accuracy = measure_accuracy(model, artefact)
    failures = judge_accuracy(accuracy, limits.min_sqnr_db, limits.max_metric_drop_pct)
    failures += judge_effect(artefact.plan, model.facts, **effect)
    evidence = {"effect": effect, "failures": failures, "notes": model.notes}
    write_atomic(folder / EVIDENCE, dumps(evidence, indent=1) + "\n")
    return write_manifest(folder, dataclasses.replace(artefact.manifest, accuracy=accuracy)), failures


def measure_accuracy(model: InferenceModel, artefact: Artefact) -> Accuracy:
    """Answer real samples of all lengths, the shortest and the longest alone, by both, and compare."""
    order = sorted(range(len(model.samples)), key=lambda i: read_length(model.samples[i], model.inputs))
    rest = sorted(order[1:-1])
    begin_s, chosen, reference, here = time.perf_counter(), list[int](), list[Sample](), list[Sample]()
    for group in filter(None, (order[:1], order[1:][-1:], *(rest[i : i + BATCH] for i in range(0, len(rest), BATCH)))):
        samples = [model.samples[n] for n in group]
        torch.set_float32_matmul_precision("highest")  # a candidate of TF32 sets it for all of the process
        reference += model.answer(samples)
        here += artefact.answer(samples)
        chosen += group
        if len(chosen) >= MIN_JUDGED and time.perf_counter() - begin_s > REFERENCE_S:
            break
    sqnr_db, largest = compare_outputs(reference, here)
    found = Accuracy(sqnr_db=sqnr_db, max_abs_error=largest, n_samples=len(chosen))
    metrics = model.workload.metrics
    targets = [tree_map_only(Tensor, lambda tensor: tensor.cpu(), model.targets[i]) for i in chosen if metrics]
    drops = []
    for name, metric in metrics.items():
        rate = lambda each, target, metric=metric: float(metric(model.rebuild(each), target).float().mean())  # noqa: E731
        drops.append(compute_metric_drop(name, *([*map(rate, answers, targets)] for answers in (reference, here))))
    worst = max(drops, key=lambda drop: drop["metric_drop_ci95"][1] / (abs(drop["metric_fp32"]) or 1.0), default={})
    changed_pct = compute_changed_labels_pct(reference, here) if "accuracy" in " ".join(metrics) else None
    return dataclasses.replace(found, changed_labels_pct=changed_pct, **worst)


def measure_effect(artefact: Artefact) -> dict[str, Any]:
    """Watch a candidate that was just opened over the declared shapes, and measure it against eager fp32 in turns.

    It returns what ``judge_effect`` takes.
    """
    run, shapes = artefact.run, artefact.list_shapes()
    n_before, _ = run.count_graphs()
    for inputs in shapes:
        run(inputs)
    gain = None
    if not is_eager(artefact.plan):
        gain = compare_speed(open_eager(artefact.folder, artefact.manifest).run, run, shapes)
    operators = run.list_operators(shapes[0])
    n_builds, n_graph_runs = run.count_graphs()
    return {"operators": operators, "n_builds": n_builds - n_before, "n_graph_runs": n_graph_runs, "gain": gain}
