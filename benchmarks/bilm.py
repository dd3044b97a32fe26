"""Words per second of a bidirectional language model, beside a plain port of guide 004's loop; and what each cost.

All arms train the same model (LSTM stacks of two layers with a projection, 50,000 words) on the same windows of
WikiText-2 in the same order. ``headline`` runs short trainings, a round an arm and seed, and judges speed alone.
Validation perplexity over all words, after as many words for all, stands beside it and is not judged: so few steps from
random weights end near the same perplexity whatever the softmax, and say nothing of where a whole training ends.
``one at a time`` takes the guide's loop with everything it does done at every batch, and spares it one thing.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks._bilm_arms import (
    DROPOUT,
    LEARNING_RATE,
    MODEL,
    VOCAB_SIZE,
    Clocks,
    Size,
    Trained,
    build_loop,
    open_windows,
    prepare,
    take_batches,
    train_guide,
    train_ours,
)
from benchmarks._bilm_guide import AFTER, ALL_EACH_BATCH, BEFORE, CLIP_NORM, COSTS, ONLY_ON_CUDA, ROWS_BEFORE
from benchmarks._rounds import Round, compute_differences, compute_means, run_rounds
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge

NAME = "bilm"
CLAIM = (
    "The language model of guide 004 trains at least 4 times as many words per second with an adaptive or sampled "
    "softmax as the guide's loop with its full one, at the same vocabulary, batch and windows."
)
NEEDS_PEERS = True
DEVICES = ("cpu", "cuda")

GUIDE, GUIDE_AFTER = "guide's loop", "guide's six changes"
OURS: Mapping[str, Mapping[str, Any]] = {
    "fulltilt full": {"softmax": "full", "training_metrics": True},
    "fulltilt chunked": {"softmax": "chunked", "training_metrics": True},
    "fulltilt adaptive": {"softmax": "adaptive"},
    "fulltilt sampled": {"softmax": "sampled", "n_sampled": 2048},
}
JUDGED = ("fulltilt adaptive", "fulltilt sampled")
LEAST_SPEEDUP = 4.0
EVERYTHING, AGAIN = "everything each batch", "everything again"
NOTES: Mapping[str, str] = {
    GUIDE: "full softmax, packed, metrics each batch, a DataFrame copied for each row",
    GUIDE_AFTER: "all six changes of the guide",
    AGAIN: "the loop against itself: what the method calls a difference where there is none",
    "fulltilt full": "all logits at once, metrics on every batch",
    "fulltilt chunked": "the same numbers, metrics on every batch",
    "fulltilt adaptive": "fewer features for rare words; metrics in evaluation",
    "fulltilt sampled": "2,048 sampled words in training, all in evaluation",
}


# A median takes 6 rounds to have an interval.
HEADLINE = {
    "cpu": Size(batch_size=16, seq_len=64, n_steps=8, n_rounds=6, n_val=32),
    "cuda": Size(batch_size=32, seq_len=128, n_steps=400, n_rounds=6, n_val=256),
}
ONE_AT_A_TIME = {
    "cpu": Size(batch_size=8, seq_len=32, n_steps=2, n_rounds=6, n_val=1),
    "cuda": Size(batch_size=32, seq_len=128, n_steps=20, n_rounds=8, n_val=1),
}


def run(context: Context) -> Findings:
    if context.device == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as name:
        folder = Path(name)
        tokens, said = prepare(folder / "tokens")
        headline = _shorten(HEADLINE[context.device], context.quick)
        one = _shorten(ONE_AT_A_TIME[context.device], context.quick)
        rows = measure_headline(tokens, headline, context.device)
        arms, targets = describe_headline(rows, headline)
        arms += measure_costs(tokens, one, context.device)
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=(said, *_describe_method(context.device)))


def measure_headline(tokens: Path | None, size: Size, device: str) -> dict[str, list[Trained]]:
    """A training of every arm for each seed, in an order that turns from round to round."""
    names = [GUIDE, GUIDE_AFTER, *OURS]
    rows: dict[str, list[Trained]] = {name: [] for name in names}
    for seed in range(size.n_rounds):
        for name in [*names[seed % len(names) :], *names[: seed % len(names)]]:
            with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
                given = (tokens, size, device, Path(folder), seed)
                if name in OURS:
                    rows[name].append(train_ours(*given, options=OURS[name]))
                else:
                    rows[name].append(train_guide(*given, habits=BEFORE if name == GUIDE else AFTER))
    return rows


def measure_costs(tokens: Path | None, size: Size, device: str) -> list[Arm]:
    """The loop that does everything at every batch less the loop that is spared one thing: its cost once."""
    spared = {name: cost.without for name, cost in COSTS.items() if device == "cuda" or name not in ONLY_ON_CUDA}
    habits = {EVERYTHING: ALL_EACH_BATCH, AGAIN: ALL_EACH_BATCH, **spared}
    windows, _ = open_windows(tokens, size)
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        build = functools.partial(build_loop, tokens, size, device, Path(folder), seed=0, n_before=ROWS_BEFORE)
        loops = {name: build(habits=these) for name, these in habits.items()}

        def run_block(name: str) -> float:
            clocks = Clocks(device)
            loops[name].run(take_batches(windows, size, 0))
            wall_s, cpu_s = clocks.read()
            return 1e3 * (wall_s if device == "cuda" else cpu_s) / size.n_steps

        for name in habits:  # first steps allocate the optimizer's state
            run_block(name)
        rounds = run_rounds(list(habits), run_block, n_rounds=size.n_rounds)
    return describe_costs(rounds, spared, size)


def describe_costs(rounds: Sequence[Round[float]], names: Iterable[str], size: Size) -> list[Arm]:
    build = functools.partial(
        build_arm, case=f"one at a time, {size.describe()}", unit_of_replication="round of two blocks, interleaved"
    )
    arms = [build(compute_means(rounds, EVERYTHING, float), arm=EVERYTHING, metric="step_ms")]
    for name in [AGAIN, *names]:
        note = COSTS[name].how_often if name in COSTS else NOTES[name]
        saved = [-ms for ms in compute_differences(rounds, name, EVERYTHING, float)]
        arms.append(build(saved, arm=name, metric="cost_ms_each_time", note=note))
    return arms


def describe_headline(rows: Mapping[str, Sequence[Trained]], size: Size) -> tuple[list[Arm], list[Target]]:
    build = functools.partial(build_arm, case=f"headline, {size.describe()}", unit_of_replication="training, a seed")
    arms, targets = [], []
    for name, trained in rows.items():
        for metric in ("words_per_s", "words_per_cpu_s", "perplexity"):
            arms.append(build([getattr(t, metric) for t in trained], arm=name, metric=metric, note=NOTES[name]))
    for name in OURS:
        pairs = list(zip(rows[name], rows[GUIDE], strict=True))
        speedup = build([a.words_per_s / b.words_per_s for a, b in pairs], arm=name, metric="speedup_over_guide")
        cpu = build([a.words_per_cpu_s / b.words_per_cpu_s for a, b in pairs], arm=name, metric="speedup_cpu_time")
        quality = build([a.perplexity / b.perplexity for a, b in pairs], arm=name, metric="perplexity_over_guide")
        arms += [speedup, cpu, quality]
        if name in JUDGED:
            said = (
                f"perplexity {quality.median:.3f} times that of the guide's loop after {size.n_steps} steps: not judged"
            )
            targets.append(
                judge(
                    f"{name}: words/s over the guide", speedup.median, speedup.ci95, at_least=LEAST_SPEEDUP, note=said
                )
            )
    return arms, targets


def _shorten(size: Size, quick: bool) -> Size:
    """Small enough to see in a minute that everything runs."""
    small = {"batch_size": 2, "seq_len": 8, "n_steps": 2, "n_rounds": 1, "n_val": 2}
    return dataclasses.replace(size, **small) if quick else size


def _describe_method(device: str) -> tuple[str, ...]:
    return (
        f"model: {VOCAB_SIZE:,} words, {', '.join(f'{name} {value}' for name, value in MODEL.items())}, dropout "
        f"{DROPOUT}, separate heads; Adam {LEARNING_RATE:g}, gradient norm {CLIP_NORM:g}, fp32"
        + (", 1 thread" if device == "cpu" else ""),
        "the guide's projection with ReLU outside of the LSTM is the LSTM's own here, in all arms",
        "words/s counts each word of a window once; it is predicted from both sides",
        "perplexity is over all words and both directions; every arm saw the same windows in the same order",
        f"one at a time: what a thing costs once, by CPU time on a CPU; the DataFrame holds {ROWS_BEFORE:,} rows when "
        "a block begins; what the guide does less often than each batch costs a step that much less",
        "the full softmax by itself: fulltilt full beside chunked, adaptive and sampled in the headline",
        "cuDNN flags and empty_cache are measured where there is a GPU; on a CPU they do nothing",
    )
