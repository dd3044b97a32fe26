"""Answer batches with an artefact at each order, in the process of one arm; ``bench`` is its other side.

An order is a text: a shape, ``{"batch": 8, "length": 32}`` (null: the longest sample), or a policy for real samples,
``{"policy": {…}, "n_samples": 64}``; with ``"in_order": true`` batches are taken in the order of the samples, whatever
their lengths. torch is loaded only where the artefact needs it.
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.errors import FulltiltError
from fulltilt.hardware import read_rss_bytes
from fulltilt.infer.joining import Sample, join_samples, read_length
from fulltilt.infer.manifest import InputSpec, Policy
from fulltilt.infer.search.simulate import Sample as Waiting
from fulltilt.infer.search.simulate import take_batch
from fulltilt.records import decode, encode
from fulltilt.stats import Block
from fulltilt.tuner.trials.kinds import END
from fulltilt.tuner.trials.measuring import Link

BLOCK_S = 0.1
N_SETTLING = 2  # calls after a turn of another process that are not timed, where they are short
SLOW_CALL_S = 0.1
N_TIMES = 64  # single calls whose times are told
STALLED = 5.0  # times a quick call
GIB = 2**30


def run(message: Mapping[str, Any], link: Link) -> None:
    """Open the artefact, say how long its first answer took, then do each order.

    Raises:
        FulltiltError: the artefact falls back to eager, so that it is not what is to be measured.
    """
    from fulltilt.infer.artefact import open_artefact

    begin_s = time.perf_counter()
    artefact = open_artefact(Path(message["given"]["folder"]))
    if artefact.notes:
        raise FulltiltError("; ".join(artefact.notes))
    artefact.answer(artefact.samples[:1])
    cold_start_s = time.perf_counter() - begin_s
    lengths = [read_length(sample, artefact.manifest.inputs) for sample in artefact.samples]
    link({"blocks": 0, "cold_start_s": cold_start_s, "lengths": lengths})
    callers, memory_gib = dict[str, Caller](), 0.0
    for number, text in enumerate(link.take_orders(), start=1):
        if text == END:
            break
        if text not in callers:
            order = json.loads(text)
            batches = build_batches(artefact.samples, artefact.manifest.inputs, order)
            multiple = order.get("policy", {}).get("length_multiple", 1)
            callers[text] = Caller(functools.partial(_answer, artefact, multiple), batches, is_mixed="policy" in order)
        block, calls_s = callers[text].take_block()
        memory_gib = max(memory_gib, read_memory_gib())
        link({"blocks": number, "block": encode(block), "calls_s": calls_s, "memory_gib": memory_gib})


class Caller:
    """Calls the artefact with batches, one after the other, in timed blocks."""

    def __init__(
        self,
        answer: Callable[[Sequence[Sample]], Any],
        batches: Sequence[Sequence[Sample]],
        *,
        is_mixed: bool,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._answer, self._batches, self._is_mixed, self._clock = answer, batches, is_mixed, clock
        self._call_s = 0.0
        for batch in (*batches, batches[0]):  # every shape once: what compiles has compiled
            begin_s = clock()
            answer(batch)
            self._call_s = clock() - begin_s

    def take_block(self) -> tuple[Block, list[float]]:
        """Time calls for a tenth of a second, at least one; whole passes where batches differ → block, single calls."""
        for _ in range(N_SETTLING if self._call_s < SLOW_CALL_S else 0):
            self._answer(self._batches[0])
        times_s, n_samples, begin_s = list[float](), 0, self._clock()
        while not times_s or self._clock() - begin_s < BLOCK_S:
            for batch in self._batches:
                start_s = self._clock()
                self._answer(batch)
                times_s.append(self._clock() - start_s)
                n_samples += len(batch)
        seconds, quick_s = self._clock() - begin_s, sorted(times_s)[len(times_s) // 10]
        self._call_s = seconds / len(times_s)
        if self._is_mixed:  # single calls of several lengths say nothing of stalls and jitter
            return Block(n_samples=n_samples, seconds=seconds), []
        stalled_s = sum(call_s for call_s in times_s if call_s > STALLED * quick_s)
        return Block(n_samples=n_samples, seconds=seconds, stalled_s=stalled_s), times_s[:N_TIMES]


def _answer(artefact: Any, length_multiple: int, samples: Sequence[Sample]) -> Any:
    """Answer as the server does, with the lengths of another policy than the artefact's."""
    if length_multiple == 1 or artefact.manifest.joins != "pad":
        return artefact.answer(samples)
    return artefact.run(join_samples(samples, artefact.manifest.inputs, length_multiple))


def build_batches(
    samples: Sequence[Sample], inputs: Sequence[InputSpec], order: Mapping[str, Any]
) -> list[list[Sample]]:
    """Build the batches of an order from real samples."""
    lengths = [read_length(sample, inputs) for sample in samples]
    if "policy" not in order:
        length = order["length"] or max(lengths)
        near = sorted(range(len(samples)), key=lambda i: abs(lengths[i] - length))
        chosen = [samples[near[i % len(near)]] for i in range(order["batch"])]
        return [[resize_sample(sample, inputs, length) for sample in chosen]]
    policy, n = decode(Policy, order["policy"]), order["n_samples"]
    chosen = [int(i * max(1.0, len(samples) / n)) % len(samples) for i in range(n)]  # evenly, or all in turn
    if order.get("in_order"):
        size = policy.max_batch
        return [[samples[i] for i in chosen[at : at + size]] for at in range(0, n, size)]
    waiting, batches = [Waiting(lengths[i], i) for i in chosen], []
    while waiting:
        batch, waiting = take_batch(waiting, policy)
        batches.append([samples[each.request] for each in batch])
    return batches


def resize_sample(sample: Sample, inputs: Sequence[InputSpec], length: int) -> Sample:
    """Cut or repeat the inputs that vary to a length."""
    pairs = zip(sample, inputs, strict=True)
    return tuple(np.resize(array, (length, *array.shape[1:])) if spec.varies else array for array, spec in pairs)


def read_memory_gib() -> float:
    """Read what this process holds: of the GPU where it uses one, else of host memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_reserved() / GIB
    return (read_rss_bytes(os.getpid()) or 0) / GIB
