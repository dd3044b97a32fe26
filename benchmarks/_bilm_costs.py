"""The cost of each thing that guide 004's loop does beside training, one at a time.

On a CPU nothing runs beside it, so the CPU time inside a thing is what it costs: steps that differ by a tenth of 1.4 s
would hide it in a difference. Packing is work of the LSTM itself, forward and backward: the layers alone, packed less
not packed. On a GPU a thing costs what the step waits for it: the loop that does everything at every batch, less the
loop that is spared one thing.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from benchmarks._bilm_arms import MODEL, Size, build_loop, open_windows, read_clock, take_batches
from benchmarks._bilm_guide import ALL_EACH_BATCH, COSTS, ROWS_BEFORE, GuideLoop, GuideModel
from benchmarks._rounds import Round, compute_differences, compute_means, run_rounds
from benchmarks._schema import Arm, build_arm

EVERYTHING, AGAIN = "everything each batch", "everything again"
AGAIN_NOTE = "the same against itself: what the method calls a difference where there is none"
HABITS = {EVERYTHING: ALL_EACH_BATCH, AGAIN: ALL_EACH_BATCH, **{name: cost.without for name, cost in COSTS.items()}}
METRIC = "cost_ms_each_time"
OF_THE_LAYERS = ("packed sequences", "packed, a call a layer")
N_PASSES, N_ROUNDS = 4, 12  # of the layers alone


def measure_costs(tokens: Path | None, size: Size, device: str, folder: Path) -> list[Arm]:
    build = functools.partial(build_loop, tokens, size, device, folder, seed=0, n_before=ROWS_BEFORE)
    if device == "cuda":
        return _measure_spared(build, tokens, size)
    return [*_time_parts(build, tokens, size), *_measure_packing(size)]


def _time_parts(build: Callable[..., GuideLoop], tokens: Path | None, size: Size) -> list[Arm]:
    windows, _ = open_windows(tokens, size)
    loop, began = build(habits=ALL_EACH_BATCH), time.process_time()
    loop.run(take_batches(windows, size, 0))
    step_ms = 1e3 * (time.process_time() - began) / size.n_steps
    case = f"one at a time, {size.describe()}, CPU time inside each"
    arm = functools.partial(build_arm, case=case, unit_of_replication="step, but for the first")
    return [
        build_arm([step_ms], case=case, arm=EVERYTHING, metric="step_ms", unit_of_replication="run"),
        *(arm(spent[1:], arm=name, metric=METRIC, note=COSTS[name].how_often) for name, spent in loop.spent_ms.items()),
    ]


def _measure_packing(size: Size) -> list[Arm]:
    x = torch.randn(size.batch_size, size.seq_len, MODEL["embedding"])
    lengths = torch.full((size.batch_size,), size.seq_len)
    torch.manual_seed(0)
    models = {name: GuideModel(MODEL, 2, HABITS[name]) for name in (EVERYTHING, AGAIN, *OF_THE_LAYERS)}

    def run_block(name: str) -> float:
        began = time.process_time()
        for _ in range(N_PASSES):
            models[name].run_layers(x, lengths).sum().backward()
        return 1e3 * (time.process_time() - began) / N_PASSES

    for name in models:
        run_block(name)
    case = f"one at a time, {size.batch_size} × {size.seq_len} words, the layers alone"
    return describe_costs(run_rounds(list(models), run_block, n_rounds=N_ROUNDS), OF_THE_LAYERS, case)


def _measure_spared(build: Callable[..., GuideLoop], tokens: Path | None, size: Size) -> list[Arm]:
    windows, _ = open_windows(tokens, size)
    loops = {name: build(habits=habits) for name, habits in HABITS.items()}

    def run_block(name: str) -> float:
        began_s = read_clock("cuda")
        loops[name].run(take_batches(windows, size, 0))
        return 1e3 * (read_clock("cuda") - began_s) / size.n_steps

    for name in loops:  # first steps allocate the optimizer's state
        run_block(name)
    rounds = run_rounds(list(loops), run_block, n_rounds=size.n_rounds)
    return describe_costs(rounds, COSTS, f"one at a time, {size.describe()}")


def describe_costs(rounds: Sequence[Round[float]], names: Iterable[str], case: str) -> list[Arm]:
    build = functools.partial(build_arm, case=case, unit_of_replication="round of two blocks, interleaved")
    arms = [build(compute_means(rounds, EVERYTHING), arm=EVERYTHING, metric="step_ms")]
    for name in [AGAIN, *names]:
        saved = compute_differences(rounds, EVERYTHING, name)
        note = COSTS[name].how_often if name in COSTS else AGAIN_NOTE
        arms.append(build(saved, arm=name, metric=METRIC, note=note))
    return arms
