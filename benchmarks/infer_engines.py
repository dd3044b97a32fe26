"""Measure every engine of inference against eager PyTorch, which is chosen, and how soon it answers.

All engines of a size live in one process, with one thread, and take turns on each shape; the figure is the ratio of
seconds in one round, CPU seconds without a GPU. A cell is a size with a shape: a load of its own, as a search is for
one load. Its engine is chosen by the first half of the rounds and judged by the second.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._child import call_in_process
from benchmarks._rounds import compute_geometric_ratios, run_rounds
from benchmarks._runner import ROOT, Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge, judge_median

CLAIM = (
    "The chosen engine is at least twice as fast as eager PyTorch, and an artefact of a CPU answers within a second."
)
NEEDS_PEERS = False
DEVICES = ("cpu", "cuda")

SIZES = ("minilm", "bert_base")
SHAPES = {"1 × 32": (1, 32), "1 × 128": (1, 128), "8 × 128": (8, 128)}
LARGE = {"64 × 128": (64, 128)}  # on a GPU, too
EAGER = "eager"
ENGINES: Mapping[str, Mapping[str, str]] = {
    EAGER: {},
    "eager int8": {"quantization": "int8"},
    "compile": {"engine": "compile"},
    "compile int8": {"engine": "compile", "quantization": "int8"},
    "aot": {"engine": "aot"},
    "onnx": {"engine": "onnx"},
    "onnx int8": {"engine": "onnx", "quantization": "int8"},
}
QUICK = (EAGER, "eager int8", "onnx int8")
GPU_ENGINES: Mapping[str, Mapping[str, Any]] = {
    EAGER: {},
    "eager, graphs": {"cuda_graphs": True},
    "eager bf16": {"precision": "bf16"},
    "eager bf16, graphs": {"precision": "bf16", "cuda_graphs": True},
}  # fmt: skip
GPU_QUICK = (EAGER, "eager bf16, graphs")
MIN_SQNR_DB, BLOCK_S, N_ROUNDS, N_STARTS, MOST_START_S = 25.0, 0.1, 16, 7, 1.0
Ratios = dict[str, dict[str, list[float]]]
"""Shape → engine → times as fast as eager, one figure a round."""
Cell = tuple[str, str]
"""Size and shape."""


def run(context: Context) -> Findings:
    on_gpu = context.device != "cpu"
    engines, quick = (GPU_ENGINES, GPU_QUICK) if on_gpu else (ENGINES, QUICK)
    names = quick if context.quick else tuple(engines)
    starts: dict[str, list[dict[str, float]]] = {}
    arms: list[Arm] = []
    speeds: dict[str, Ratios] = {}
    sqnr_db: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as scratch:
        for size in SIZES[: 1 if context.quick or on_gpu else None]:
            folders = {name: Path(scratch) / f"{size}-{name.replace(' ', '-')}" for name in names}
            for name, folder in folders.items():
                given = {"size": size, "plan": engines[name], "folder": str(folder), "device": context.device}
                sqnr_db[size, name] = call_in_process(f"{__name__}:build", given, timeout_s=1200)
            given = {
                "folders": {name: str(folder) for name, folder in folders.items()},
                "shapes": SHAPES | LARGE if on_gpu else SHAPES,
                "quick": context.quick,
                "on_gpu": on_gpu,
            }
            speeds[size] = call_in_process(f"{__name__}:measure", given, timeout_s=3600)
            arms += _build_speed_arms(size, speeds[size])
            if size == SIZES[0] and not on_gpu:
                starts = _measure_starts(folders, 2 if context.quick else N_STARTS)
                arms += [_build_start_arm(name, found) for name, found in starts.items()]
    cells = {(size, shape): engines for size, ratios in speeds.items() for shape, engines in ratios.items()}
    chosen = {cell: _choose(cell[0], [engines], sqnr_db) for cell, engines in cells.items()}
    alone = {size: _choose(size, ratios.values(), sqnr_db) for size, ratios in speeds.items()}
    of_all = _compute_share(cells, {cell: alone[cell[0]] for cell in cells})
    notes = (
        *(f"{size}, {shape} tokens: {name} was chosen" for (size, shape), name in chosen.items()),
        f"with one engine for all shapes of a size ({', '.join(f'{size}: {name}' for size, name in alone.items())}) "
        f"the share of the best is {of_all:.2f}",
        "SQNR in dB: " + ", ".join(f"{size} {name} {found:.1f}" for (size, name), found in sqnr_db.items()),
        "weights are random: the accuracy of a trained model is the gate's business",
    )
    return Findings(arms=tuple(arms), targets=tuple(_judge(cells, chosen, sqnr_db, starts)), notes=notes)


def build(size: str, plan: Mapping[str, Any], folder: str, device: str) -> float:
    """Build one artefact, one thread, and return its ratio of signal to error in dB. Runs in a process of its own."""
    from fulltilt.config import config_from_values, inference_plan_of
    from fulltilt.infer.artefact import build_artefact, open_artefact
    from fulltilt.infer.building import measure_accuracy
    from fulltilt.infer.model import build_inference_model

    values = {"task": f"benchmarks._encoders:{size}", "speed": {"threads": 1}, "run": {"device": device}}
    config = config_from_values(values, base_dir=str(ROOT))
    model = build_inference_model(config, device=device, n_samples=64)
    build_artefact(model, inference_plan_of(config).replace(**plan), Path(folder), name=size)
    artefact = open_artefact(Path(folder))
    assert not artefact.notes, artefact.notes
    return measure_accuracy(model, artefact).sqnr_db


def measure(folders: Mapping[str, str], shapes: Mapping[str, tuple[int, int]], quick: bool, on_gpu: bool) -> Ratios:
    """Measure all engines in turns on each shape. Runs in a process of its own."""
    from fulltilt.infer.artefact import open_artefact

    runners = {name: open_artefact(Path(folder)).run for name, folder in folders.items()}
    found: Ratios = {}
    clock = time.perf_counter if on_gpu else time.process_time
    for shape, (batch, length) in shapes.items():
        inputs = (np.random.default_rng(0).integers(1, 30522, (batch, length)),)
        begin_s = clock()
        runners[EAGER](inputs)
        runners[EAGER](inputs)
        n_calls = max(1, math.ceil(BLOCK_S / max(1e-4, (clock() - begin_s) / 2)))

        def run_block(name: str, inputs: Any = inputs, n_calls: int = n_calls) -> float:
            start_s = clock()
            for _ in range(n_calls):
                runners[name](inputs)
            return clock() - start_s

        for name in runners:
            run_block(name)
        rounds = run_rounds(list(runners), run_block, n_rounds=2 if quick else N_ROUNDS)
        found[shape] = {name: compute_geometric_ratios(rounds, EAGER, name) for name in runners}
    return found


def start(folder: str) -> dict[str, float]:
    """Open an artefact and answer its first sample, in a process that has imported nothing. Seconds, and recompiles."""
    begin_s = time.perf_counter()
    from fulltilt.infer.artefact import open_artefact

    artefact = open_artefact(Path(folder))
    artefact.answer(artefact.samples[:1])
    first_s = time.perf_counter() - begin_s
    before, _ = artefact.run.count_graphs()
    for size in (1, 2, 5, 8):
        artefact.answer(artefact.samples[:size])
    return {"first_s": first_s, "n_builds": artefact.run.count_graphs()[0] - before}


def _measure_starts(folders: Mapping[str, Path], n: int) -> dict[str, list[dict[str, float]]]:
    """Start each engine ``n`` times, in turns, and twice as often what answers within the limit."""
    starts: dict[str, list[dict[str, float]]] = {name: [] for name in folders}
    for number in range(2 * n):
        for name, folder in folders.items():
            if number < n or statistics.median(found["first_s"] for found in starts[name]) <= MOST_START_S:
                starts[name].append(call_in_process(f"{__name__}:start", {"folder": str(folder)}, timeout_s=600))
    return starts


def _build_speed_arms(size: str, ratios: Ratios) -> list[Arm]:
    return [
        build_arm(
            samples, case=f"{size}, {shape} tokens", arm=name, metric="times_as_fast_as_eager",
            unit_of_replication="round of all engines in turns",
        )
        for shape, engines in ratios.items()
        for name, samples in engines.items()
    ]  # fmt: skip


def _build_start_arm(name: str, starts: list[dict[str, float]]) -> Arm:
    return build_arm(
        [found["first_s"] for found in starts], case=f"{SIZES[0]}, cold start", arm=name, metric="first_answer_s",
        unit_of_replication="process", note="from the first import to the first answer",
    )  # fmt: skip


def _choose(
    size: str, shapes: Iterable[Mapping[str, Sequence[float]]], sqnr_db: Mapping[tuple[str, str], float]
) -> str:
    """Choose by the first half of the rounds: the largest geometric mean over the shapes within the accuracy."""
    shapes = list(shapes)

    def score(name: str) -> float:
        halves = [engines[name][: len(engines[name]) // 2] for engines in shapes]
        return statistics.fmean(math.log(statistics.median(half)) for half in halves)

    return max((name for name in shapes[0] if sqnr_db[size, name] >= MIN_SQNR_DB), key=score)


def _compute_share(cells: Mapping[Cell, Mapping[str, Sequence[float]]], chosen: Mapping[Cell, str]) -> float:
    """Compute the geometric mean of the chosen engine's speed as a share of the best one's, by the second half."""
    speeds = {
        cell: {name: statistics.median(_second_half(samples)) for name, samples in engines.items()}
        for cell, engines in cells.items()
    }
    return math.exp(
        statistics.fmean(math.log(found[chosen[cell]] / max(found.values())) for cell, found in speeds.items())
    )


def _judge(
    cells: Mapping[Cell, Mapping[str, Sequence[float]]],
    chosen: Mapping[Cell, str],
    sqnr_db: Mapping[tuple[str, str], float],
    starts: Mapping[str, list[dict[str, float]]],
) -> list[Target]:
    own = [_second_half(engines[chosen[cell]]) for cell, engines in cells.items()]
    means = [math.exp(statistics.fmean(map(math.log, together))) for together in zip(*own, strict=True)]
    worst = min(own, key=statistics.median)
    accuracy_db = min(sqnr_db[size, name] for (size, _), name in chosen.items())
    first = chosen[SIZES[0], next(iter(SHAPES))]
    return [
        judge_median("chosen engine over eager, geometric mean over cells", means, at_least=2.0),
        judge_median("chosen engine over eager, slowest cell", worst, at_least=1.0),
        judge(
            "chosen engine as a share of the best of each cell, geometric mean",
            _compute_share(cells, chosen), None, at_least=0.95,
        ),
        judge("SQNR of the chosen engine, in dB", accuracy_db, None, at_least=MIN_SQNR_DB),
        *(_judge_starts(first, starts[first]) if starts else _judge_one_sample(cells, chosen)),
    ]  # fmt: skip


def _judge_starts(name: str, starts: Sequence[Mapping[str, float]]) -> list[Target]:
    n_builds = sum(found["n_builds"] for found in starts)
    return [
        judge_median(
            f"first answer of {name}, cold, in s", [found["first_s"] for found in starts], at_most=MOST_START_S
        ),
        judge("compiled anew over sizes and lengths", float(n_builds), None, at_most=0.0),
    ]


def _judge_one_sample(cells: Mapping[Cell, Mapping[str, Sequence[float]]], chosen: Mapping[Cell, str]) -> list[Target]:
    names = {cell: chosen[cell] for cell in cells if SHAPES.get(cell[1], (0, 0))[0] == 1}
    return [
        judge_median(
            f"{name} over eager, {cell[0]}, {cell[1]} tokens (G1)", _second_half(cells[cell][name]), at_least=2.5
        )
        for cell, name in names.items()
    ]


def _second_half(samples: Sequence[float]) -> Sequence[float]:
    return samples[len(samples) // 2 :]
