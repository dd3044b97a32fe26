"""Answer batches with an artefact at each order, in the process of one arm; ``bench`` is its other side.

An order is a text: a shape, ``{"batch": 8, "length": 32}`` (null: the longest sample), or a policy for real samples,
``{"policy": {…}, "n_samples": 64}``. torch is loaded only where the artefact needs it.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.errors import FulltiltError
from fulltilt.hardware import watch_peak_bytes
from fulltilt.infer.joining import Sample, read_length
from fulltilt.infer.manifest import Manifest, Policy
from fulltilt.infer.search.simulate import Sample as Waiting
from fulltilt.infer.search.simulate import take_batch
from fulltilt.records import decode, encode
from fulltilt.stats import Block
from fulltilt.tuner.trials.kinds import END
from fulltilt.tuner.trials.measuring import Link

BLOCK_S = 0.1
N_SETTLING = 2  # calls after a turn of another process that are not timed, one where they are slow
SLOW_CALL_S = 0.1


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
    read_peak, known = watch_peak_bytes(artefact.manifest.device), dict[str, list[list[Sample]]]()
    for number, text in enumerate(link.take_orders(), start=1):
        if text == END:
            break
        order = json.loads(text)
        artefact.manifest = dataclasses.replace(artefact.manifest, policy=decode(Policy, order.get("policy", {})))
        if text not in known:
            known[text] = build_batches(artefact.samples, artefact.manifest, order)
            for batch in known[text]:  # every shape once: what compiles has compiled
                artefact.answer(batch)
        block = take_block(artefact.answer, known[text])
        link({"blocks": number, "block": encode(block), "memory_gib": read_peak() / 2**30})


def take_block(
    answer: Callable[[Sequence[Sample]], Any],
    batches: Sequence[Sequence[Sample]],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Block:
    """Answer batches in turn for a tenth of a second, once at least, after some that are not timed."""
    start_s = clock()
    for _ in range(N_SETTLING):
        answer(batches[0])
        if clock() - start_s > SLOW_CALL_S:
            break
    n_passes, begin_s = 0, clock()
    while not n_passes or clock() - begin_s < BLOCK_S:
        for batch in batches:
            answer(batch)
        n_passes += 1
    return Block(n_samples=n_passes * sum(map(len, batches)), seconds=clock() - begin_s)


def build_batches(samples: Sequence[Sample], manifest: Manifest, order: Mapping[str, Any]) -> list[list[Sample]]:
    """Build the batches of an order from real samples."""
    inputs, policy = manifest.inputs, manifest.policy
    lengths = [read_length(sample, inputs) for sample in samples]
    if "policy" not in order:
        length = order["length"] or max(lengths)
        near = sorted(range(len(samples)), key=lambda i: abs(lengths[i] - length))
        chosen = [samples[near[i % len(near)]] for i in range(order["batch"])]
        pairs = [zip(sample, inputs, strict=True) for sample in chosen]  # cut, or repeated, to the length
        return [[tuple(np.resize(x, (length, *x.shape[1:])) if i.varies else x for x, i in pair) for pair in pairs]]
    n = order["n_samples"]
    chosen = [int(i * max(1.0, len(samples) / n)) % len(samples) for i in range(n)]  # evenly, or all in turn
    waiting, batches = [Waiting(lengths[i], i) for i in chosen], []
    while waiting:
        batch, waiting = take_batch(waiting, policy)
        batches.append([samples[each.request] for each in batch])
    return batches
