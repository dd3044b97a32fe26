"""The contestants of ``bilm``: the guide's loop and fulltilt's, on the same windows in the same order."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._bilm_guide import CLIP_NORM, GuideLoop, GuideModel, GuideTracker, Habits
from benchmarks._runner import ROOT, find_data
from fulltilt.config import config_from_values
from fulltilt.data import build_loader, prepare_text
from fulltilt.data.text.text import TokenWindows, text
from fulltilt.data.text.tokens import TokenStream
from fulltilt.engine.loop.train import train
from fulltilt.listeners import CsvLog, MetricsTracker
from fulltilt.records import Evaluated, Event
from fulltilt.tasks import build_language_model
from fulltilt.tasks.models.bilm import BiLM

VOCAB_SIZE = 50_000
MODEL = {"depth": 2, "embedding": 256, "hidden": 512, "projection": 128}
LEARNING_RATE, DROPOUT = 1e-3, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What a run trains on, and how often."""

    batch_size: int
    seq_len: int
    n_steps: int
    n_rounds: int
    n_val: int  # windows

    @property
    def n_words_per_step(self) -> int:
        return self.batch_size * self.seq_len

    def describe(self) -> str:
        return f"{self.batch_size} × {self.seq_len} words, {self.n_steps} steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """What one training took to come where it is, evaluation left out."""

    n_words: int
    seconds: float
    perplexity: float

    @property
    def words_per_s(self) -> float:
        return self.n_words / self.seconds


def prepare(folder: Path) -> tuple[Path | None, str]:
    """Prepare WikiText-2, where it lies; else the text is what comes with Python, and the note says so."""
    try:
        train_file, val_file = find_data("wikitext2_valid.txt"), find_data("wikitext2_test.txt")
    except FileNotFoundError:
        return None, "text: Python's documentation topics, WikiText-2 was not found through FULLTILT_DATA"
    done = prepare_text([train_file], folder, val_file=val_file, vocab_size=VOCAB_SIZE)
    return folder, (
        f"text: WikiText-2, trained on its validation file ({done.n_train:,} tokens), validated on its test file; it "
        f"has {done.n_words:,} words, and every model has {VOCAB_SIZE:,} as in the guide: the others never come"
    )


def train_guide(tokens: Path | None, size: Size, device: str, folder: Path, seed: int, *, habits: Habits) -> Trained:
    loop = build_loop(tokens, size, device, folder, habits, seed=seed)
    windows, held_out = open_windows(tokens, size)
    began_s = read_clock(device)
    loop.run(take_batches(windows, size, seed))
    seconds = read_clock(device) - began_s
    starts = range(0, len(held_out), size.batch_size)
    batches = (held_out.get_batch(range(i, min(i + size.batch_size, len(held_out)))) for i in starts)
    perplexity = loop.compute_perplexity(batches)
    return Trained(n_words=size.n_steps * size.n_words_per_step, seconds=seconds, perplexity=perplexity)


def train_ours(
    tokens: Path | None,
    size: Size,
    device: str,
    folder: Path,
    seed: int,
    *,
    options: Mapping[str, Any],
    evaluate_every: int | None = None,
) -> list[Trained]:
    """Call ``train`` once, with its CSV files and the guide's, and return where it is at every evaluation.

    Args:
        evaluate_every: Steps; None is once, after the last.
    """
    windows, held_out = open_windows(tokens, size)
    workload = build_language_model(
        model=lambda: BiLM(vocab_size=VOCAB_SIZE, dropout=DROPOUT, **MODEL),
        train=lambda: windows,
        validation=lambda: held_out,
        optimizer=functools.partial(torch.optim.Adam, lr=LEARNING_RATE, fused=True),
        **options,
    )
    run = {"epochs": 10_000, "device": device, "seed": seed, "checkpoint_every": None}
    config = config_from_values(
        {
            "data": {"batch_size": size.batch_size, "drop_last": True},
            "optim": {"clip_norm": CLIP_NORM},
            "speed": {"threads": 1 if device == "cpu" else None, "fused_optimizer": True},
            "run": {**run, "evaluate_every": f"{evaluate_every or size.n_steps} steps"},
        },
        base_dir=str(ROOT),
    )
    found: list[Trained] = []

    def listen(event: Event) -> None:
        if isinstance(event, Evaluated):
            n_words, perplexity = event.step * size.n_words_per_step, event.metrics["perplexity"]
            found.append(Trained(n_words=n_words, seconds=event.training_seconds, perplexity=perplexity))

    listeners = [CsvLog(folder), MetricsTracker(folder / "metrics"), listen]
    train(config, out_dir=folder, listeners=listeners, workload=workload, max_steps=size.n_steps)
    return found


def read_clock(device: str) -> float:
    """Read the wall clock once the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def open_windows(tokens: Path | None, size: Size) -> tuple[TokenWindows, TokenWindows]:
    """Return those to train on, and the first ``n_val`` of those to validate on."""
    path = None if tokens is None else str(tokens)
    train_windows, val = (text(s, path=path, seq_len=size.seq_len, vocab_size=VOCAB_SIZE) for s in ("train", "val"))
    first = TokenStream(val.ids[: size.n_val * size.seq_len + 1], val.vocabulary, "validation")
    return train_windows, TokenWindows(first, size.seq_len)


def take_batches(windows: TokenWindows, size: Size, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches that the engine takes, epoch after epoch."""
    loader: Any = build_loader(windows, batch_size=size.batch_size, shuffle=True, drop_last=True, seed=seed)
    left = size.n_steps
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from itertools.islice(loader, left)
        left -= min(left, len(loader))
        if left <= 0:
            return


def build_loop(
    tokens: Path | None, size: Size, device: str, folder: Path, habits: Habits, *, seed: int, n_before: int = 0
) -> GuideLoop:
    torch.manual_seed(seed)
    windows, _ = open_windows(tokens, size)
    tracker = GuideTracker(habits, windows.vocabulary, n_before=n_before)
    return GuideLoop(GuideModel(MODEL, VOCAB_SIZE, habits), tracker, folder, device=torch.device(device))
