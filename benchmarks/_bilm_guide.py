"""Guide 004's training loop as it describes itself, each of its habits a switch; the model is that of the other arms.

A step does this beside training: reads four losses and, with metrics, four accuracies to the host; adds a row to a
DataFrame by copying all rows before it; now and then looks ten wrong words up in a dictionary that it builds for the
purpose; asks the allocator to give memory back. The sequences are packed although all are of one length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fulltilt.data.text.tokens import Vocabulary

CLIP_NORM = 5.0
ROWS_BEFORE = 2000  # of the DataFrame when a timed block begins: as in the middle of a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Habits:
    """What the loop does; the defaults are the guide's "before". An interval counts batches, 0 is never."""

    concat_per_batch: bool = True
    cudnn_deterministic: bool = True
    metrics_every: int = 1
    analysis_every: int = 100
    n_analysed: int = 10
    empty_cache_every: int = 1
    json_at: Literal["never", "epoch", "batch"] = "epoch"
    packs: bool = True
    reads_every_step: bool = True
    splits_layers: bool = True  # one call of the LSTM a layer


BEFORE = Habits()
AFTER = Habits(
    concat_per_batch=False,
    cudnn_deterministic=False,
    metrics_every=10,
    analysis_every=1000,
    n_analysed=5,
    empty_cache_every=100,
    json_at="never",
)
"""All six of the guide's changes."""


class Cost(NamedTuple):
    """Something that the loop can be spared, and how often the guide does it."""

    without: Habits
    how_often: str


ALL_EACH_BATCH = Habits(analysis_every=1, json_at="batch")
"""Everything at every batch: what is left out then saves what it costs once."""

_each = functools.partial(dataclasses.replace, ALL_EACH_BATCH)
COSTS: Mapping[str, Cost] = {
    "1 DataFrame copied": Cost(_each(concat_per_batch=False), "each batch; after the guide's change never"),
    "2 cuDNN deterministic": Cost(_each(cudnn_deterministic=False), "each batch; after the guide's change never"),
    "3 metrics": Cost(_each(metrics_every=0), "each batch; after the guide's change each 10th"),
    "4 error analysis": Cost(_each(analysis_every=0), "each 100th batch; after the guide's change each 1000th"),
    "5 empty_cache": Cost(_each(empty_cache_every=0), "each batch; after the guide's change each 100th"),
    "6 JSON file": Cost(_each(json_at="never"), "once an epoch; after the guide's change never"),
    "packed sequences": Cost(_each(packs=False), "each batch, before and after"),
    "packed, a call a layer": Cost(_each(packs=False, splits_layers=False), "each batch, before and after"),
    "reads to the host": Cost(_each(reads_every_step=False), "each batch, before and after"),
}


class GuideModel(nn.Module):
    """Two stacks of LSTM layers with a projection, two full softmax heads."""

    def __init__(self, sizes: Mapping[str, int], vocab_size: int, habits: Habits):
        super().__init__()
        self.habits = habits
        self.embedding = nn.Embedding(vocab_size, sizes["embedding"])
        nn.init.normal_(self.embedding.weight, std=sizes["embedding"] ** -0.5)
        self.dropout = nn.Dropout(0.1)
        self.stacks = nn.ModuleList(self._build_stack(sizes) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(sizes["projection"], vocab_size) for _ in range(2))

    def _build_stack(self, sizes: Mapping[str, int]) -> nn.ModuleList:
        widths = [sizes["embedding"], *[sizes["projection"]] * (sizes["depth"] - 1)]
        shape = {"hidden_size": sizes["hidden"], "proj_size": sizes["projection"], "batch_first": True}
        if not self.habits.splits_layers:
            return nn.ModuleList([nn.LSTM(widths[0], num_layers=sizes["depth"], dropout=0.1, **shape)])
        return nn.ModuleList(nn.LSTM(width, **shape) for width in widths)

    def forward(self, inputs: Tensor, targets: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        forwards = self._run_stack(0, self.dropout(self.embedding(inputs)), lengths)
        backwards = self._run_stack(1, self.dropout(self.embedding(targets.flip(1))), lengths).flip(1)
        return self.heads[0](self.dropout(forwards)), self.heads[1](self.dropout(backwards))

    def run_layers(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Run both stacks over the same words, no heads: (batch, length, embedding) → (batch, length, projection)."""
        return self._run_stack(0, x, lengths) + self._run_stack(1, x, lengths)

    def _run_stack(self, index: int, x: Tensor, lengths: Tensor) -> Tensor:
        for number, layer in enumerate(self.stacks[index]):
            x = self.dropout(x) if number else x
            x = self._run_packed(layer, x, lengths) if self.habits.packs else layer(x)[0]
        return x

    def _run_packed(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(x[order], lengths.cpu(), batch_first=True)
        padded, _ = pad_packed_sequence(layer(packed)[0], batch_first=True)
        return padded[order.argsort()]


class GuideTracker:
    """A log that keeps its rows in a DataFrame, copied for every new one, or in a list."""

    def __init__(self, habits: Habits, vocabulary: Vocabulary, *, n_before: int = 0):
        import pandas

        self._pandas, self._habits, self._vocabulary = pandas, habits, vocabulary
        row = {"batch_idx": 0, "timestamp": 0.0, "throughput": 1.0, "memory_per_sample": 1.0, "forward_time": 1.0}
        self.rows: list[dict[str, Any]] = [{**row, "batch_idx": i} for i in range(n_before)]
        self.frame = pandas.DataFrame(self.rows)
        self.errors: list[dict[str, Any]] = []

    def track(self, batch_idx: int, n_samples: int, seconds: float) -> None:
        throughput = n_samples / seconds if seconds else 0.0
        row = {"batch_idx": batch_idx, "timestamp": time.time(), "throughput": throughput}
        row |= {"memory_per_sample": 0.0, "forward_time": seconds}
        if self._habits.concat_per_batch:
            self.frame = self._pandas.concat([self.frame, self._pandas.DataFrame([row])], ignore_index=True)
        else:
            self.rows.append(row)

    def analyse(self, logits: Tensor, targets: Tensor) -> None:
        by_id = dict(enumerate(self._vocabulary.words))
        said, wanted = logits.argmax(-1).flatten(), targets.flatten()
        wrong = (said != wanted).nonzero().flatten()[: self._habits.n_analysed]
        for index in wrong.tolist():
            pair = {"target": by_id.get(wanted[index].item()), "prediction": by_id.get(said[index].item())}
            self.errors.append({**pair, "position": index})

    def write_json(self, path: Path) -> None:
        rows = self.frame.to_dict("records") if self._habits.concat_per_batch else self.rows
        path.write_text(json.dumps(rows, indent=2))


class GuideLoop:
    """The loop over batches; ``run`` goes on where the last call ended."""

    def __init__(self, model: GuideModel, tracker: GuideTracker, folder: Path, *, device: torch.device):
        self.model, self.tracker, self.folder, self.device = model.to(device), tracker, folder, device
        self.habits = model.habits
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.sums = torch.zeros(5, device=device)
        self.spent_ms: dict[str, list[float]] = defaultdict(list)  # CPU time a batch inside COSTS that have a place

    def run(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        torch.backends.cudnn.deterministic = self.habits.cudnn_deterministic
        torch.backends.cudnn.benchmark = not self.habits.cudnn_deterministic
        self.model.train()
        for index, (inputs, targets) in enumerate(batches):
            self._step(index, inputs.to(self.device), targets.to(self.device))
        if self.habits.json_at == "epoch":
            self.tracker.write_json(self.folder / "metrics.json")

    def _step(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        began = time.perf_counter()
        habits = self.habits
        lengths = torch.full((len(inputs),), inputs.shape[1], device=self.device)
        self.optimizer.zero_grad()
        logits = self.model(inputs, targets, lengths)
        wanted = (targets, inputs)
        losses = [functional.cross_entropy(x.flatten(0, 1), t.flatten()) for x, t in zip(logits, wanted, strict=True)]
        loss = (losses[0] + losses[1]) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        with self._time("reads to the host"):
            self._read([loss, *losses])
        if is_due(index, habits.metrics_every):
            with self._time("3 metrics"):
                self._read(compute_accuracies(logits, wanted))
        seconds = time.perf_counter() - began
        with self._time("1 DataFrame copied"):
            self.tracker.track(index, len(inputs), seconds)
        if is_due(index, habits.analysis_every):
            with self._time("4 error analysis"):
                self.tracker.analyse(logits[0], targets)
        if is_due(index, habits.empty_cache_every) and torch.cuda.is_available():
            torch.cuda.empty_cache()
        if habits.json_at == "batch":
            with self._time("6 JSON file"):
                self.tracker.write_json(self.folder / "metrics.json")

    @contextlib.contextmanager
    def _time(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.spent_ms[name].append(1e3 * (time.process_time() - began))

    def _read(self, values: Sequence[Tensor]) -> None:
        if self.habits.reads_every_step:
            for value in values:
                value.item()
        else:
            self.sums[: len(values)] += torch.stack([value.detach() for value in values])

    @torch.no_grad()
    def compute_perplexity(self, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
        """Compute exp of the mean loss over all words, of both directions."""
        self.model.eval()
        total, n_words = 0.0, 0
        for inputs, targets in batches:
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            lengths = torch.full((len(inputs),), inputs.shape[1], device=self.device)
            for x, t in zip(self.model(inputs, targets, lengths), (targets, inputs), strict=True):
                total += functional.cross_entropy(x.flatten(0, 1), t.flatten(), reduction="sum").item()
                n_words += t.numel()
        return math.exp(total / n_words)


def is_due(index: int, every: int) -> bool:
    return every > 0 and index % every == 0


def compute_accuracies(logits: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Compute the share of right words, and of those among the five best, of either direction."""
    shares = []
    for x, t in zip(logits, wanted, strict=True):
        shares.append((x.argmax(-1) == t).float().mean())
        shares.append((x.topk(5, dim=-1).indices == t.unsqueeze(-1)).any(-1).float().mean())
    return shares
