"""Words per second of a bidirectional language model, beside a plain port of guide 004's loop; and what each cost.

All arms train the same model (LSTM stacks of two layers with a projection, 50,000 words) on the same windows of
WikiText-2 in the same order. ``headline`` runs short trainings, a round an arm and seed, and judges words a second.
``to the same perplexity`` is a longer training: how long ours takes to the validation perplexity, over all words, that
the guide's loop ends at. ``one at a time`` tells what each thing costs that the guide's loop does beside training.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import _bilm_arms
from benchmarks._bilm_arms import Size, Trained, prepare, train_guide, train_ours
from benchmarks._bilm_costs import measure_costs
from benchmarks._bilm_guide import AFTER, BEFORE, CLIP_NORM, ROWS_BEFORE
from benchmarks._runner import Context, Findings
from benchmarks._schema import Arm, Target, build_arm, judge_median

CLAIM = (
    "With an adaptive or sampled softmax the language model of guide 004 trains at least 4 times as many words per "
    "second as the guide's loop with its full one, at the same vocabulary, batch and windows, and comes to the same "
    "validation perplexity at least 4 times as fast."
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
NOTES: Mapping[str, str] = {
    GUIDE: "full softmax, packed, metrics each batch, a DataFrame copied for each row",
    GUIDE_AFTER: "all six changes of the guide",
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
RACE = {
    "cpu": Size(batch_size=8, seq_len=32, n_steps=60, n_rounds=6, n_val=32),
    "cuda": Size(batch_size=32, seq_len=128, n_steps=2_000, n_rounds=6, n_val=256),
}
N_CHECKS = 12  # of ours, on as many words as the guide's loop has
ONE_AT_A_TIME = {
    "cpu": Size(batch_size=8, seq_len=32, n_steps=13, n_rounds=1, n_val=1),
    "cuda": Size(batch_size=32, seq_len=128, n_steps=20, n_rounds=8, n_val=1),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lap:
    """One seed of the race."""

    guide: Trained
    ours: Mapping[str, Sequence[Trained]]

    def find_reached(self, name: str) -> Trained | None:
        """Return where the arm's perplexity was first as low as the guide's in the end; None where it never was."""
        return next((there for there in self.ours[name] if there.perplexity <= self.guide.perplexity), None)


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
        race = _shorten(RACE[context.device], context.quick)
        more_arms, more_targets = describe_race(measure_race(tokens, race, context.device), race)
        arms += [*more_arms, *measure_costs(tokens, one, context.device, folder)]
        targets += more_targets
    return Findings(arms=tuple(arms), targets=tuple(targets), notes=(said, *_describe_method(context.device)))


def measure_headline(tokens: Path | None, size: Size, device: str) -> dict[str, list[Trained]]:
    """Train every arm for each seed, in an order that turns from round to round."""
    names = [GUIDE, GUIDE_AFTER, *OURS]
    rows: dict[str, list[Trained]] = {name: [] for name in names}
    for seed in range(size.n_rounds):
        for name in [*names[seed % len(names) :], *names[: seed % len(names)]]:
            with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
                given = (tokens, size, device, Path(folder), seed)
                if name in OURS:
                    rows[name].append(train_ours(*given, options=OURS[name])[-1])
                else:
                    rows[name].append(train_guide(*given, habits=BEFORE if name == GUIDE else AFTER))
    return rows


def measure_race(tokens: Path | None, size: Size, device: str) -> list[Lap]:
    """Run the guide's loop for each seed, then ours for as many steps, looked at ``N_CHECKS`` times on the way."""
    laps, every = [], max(1, size.n_steps // N_CHECKS)
    for seed in range(size.n_rounds):
        with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
            guide = train_guide(tokens, size, device, Path(folder), seed, habits=BEFORE)
            ours = {}
            for name in JUDGED:
                given = (tokens, size, device, Path(folder) / name, seed)
                ours[name] = train_ours(*given, options=OURS[name], evaluate_every=every)
        laps.append(Lap(guide=guide, ours=ours))
    return laps


def describe_race(laps: Sequence[Lap], size: Size) -> tuple[list[Arm], list[Target]]:
    case = f"to the same perplexity, {size.describe()}"
    build = functools.partial(build_arm, case=case, unit_of_replication="training, a seed")
    arms = [build([lap.guide.perplexity for lap in laps], arm=GUIDE, metric="perplexity", note=NOTES[GUIDE])]
    targets = []
    for name in JUDGED:
        reached = [lap.find_reached(name) for lap in laps]
        pairs = list(zip(laps, reached, strict=True))
        times, words = (
            [getattr(lap.guide, part) / getattr(there, part) if there else 0.0 for lap, there in pairs]
            for part in ("seconds", "n_words")
        )
        arms += [
            build(times, arm=name, metric="speedup_to_the_guides_perplexity", note=NOTES[name]),
            build(words, arm=name, metric="words_of_the_guide_over_words_to_it"),
            build([lap.ours[name][-1].perplexity for lap in laps], arm=name, metric="perplexity"),
        ]
        missed = sum(there is None for there in reached)
        said = f"{missed} of {len(laps)} trainings did not come there in as many words, and count as 0"
        title = f"{name}: times as fast to the guide's perplexity"
        targets.append(judge_median(title, times, at_least=LEAST_SPEEDUP, note=said if missed else None))
    return arms, targets


def describe_headline(rows: Mapping[str, Sequence[Trained]], size: Size) -> tuple[list[Arm], list[Target]]:
    build = functools.partial(build_arm, case=f"headline, {size.describe()}", unit_of_replication="training, a seed")
    arms, targets = [], []
    for name, trained in rows.items():
        for metric in ("words_per_s", "perplexity"):
            arms.append(build([getattr(t, metric) for t in trained], arm=name, metric=metric, note=NOTES[name]))
    for name in OURS:
        pairs = list(zip(rows[name], rows[GUIDE], strict=True))
        speedup = [a.words_per_s / b.words_per_s for a, b in pairs]
        quality = build([a.perplexity / b.perplexity for a, b in pairs], arm=name, metric="perplexity_over_guide")
        arms += [build(speedup, arm=name, metric="speedup_over_guide"), quality]
        if name in JUDGED:
            said = f"perplexity {quality.median:.3f} times that of the guide's loop after {size.n_steps} steps"
            title = f"{name}: words/s over the guide"
            targets.append(judge_median(title, speedup, at_least=LEAST_SPEEDUP, note=said))
    return arms, targets


def _shorten(size: Size, quick: bool) -> Size:
    """Make a quick run small enough to see in a minute that everything runs."""
    small = {"batch_size": 2, "seq_len": 8, "n_steps": 2, "n_rounds": 1, "n_val": 2}
    return dataclasses.replace(size, **small) if quick else size


def _describe_method(device: str) -> tuple[str, ...]:
    sizes = ", ".join(f"{name} {value}" for name, value in _bilm_arms.MODEL.items())
    return (
        f"model: {_bilm_arms.VOCAB_SIZE:,} words, {sizes}, dropout {_bilm_arms.DROPOUT}, separate heads; Adam "
        f"{_bilm_arms.LEARNING_RATE:g}, gradient norm {CLIP_NORM:g}, fp32" + (", 1 thread" if device == "cpu" else ""),
        "the guide's projection with ReLU outside of the LSTM is the LSTM's own here, in all arms",
        "words/s counts each word of a window once; it is predicted from both sides",
        "perplexity is over all words and both directions; every arm saw the same windows in the same order",
        f"one at a time: what a thing costs once; the DataFrame holds {ROWS_BEFORE:,} rows when a block begins; what "
        "the guide does less often than each batch costs a step that much less",
        f"to the same perplexity: ours is looked at {N_CHECKS} times, and the first that is as low counts; evaluation "
        "takes no time in either",
        "the full softmax by itself: fulltilt full beside chunked, adaptive and sampled in the headline",
        "cuDNN flags and empty_cache are measured where there is a GPU; on a CPU they do nothing",
    )
