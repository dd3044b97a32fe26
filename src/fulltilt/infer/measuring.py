"""Build the model, warm it up and measure it, in the measuring process. Imports torch.

The process only infers, so its memory is that of inference. It answers with one object a line: ``{"progress": [done,
total]}``, then ``{"measured": {…}}`` or ``{"failure": {…}}``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fulltilt.config import config_from_values
from fulltilt.infer.load import draw_arrivals_s, serve
from fulltilt.infer.served import ServedModel
from fulltilt.infer.targets import Figures, Load, plan_requests
from fulltilt.measure import MemoryMeter
from fulltilt.records import decode, encode
from fulltilt.tuner.trials.measuring import Answer

WARM_UP_S = 1.0
MIN_WARM_UP = 3
BLOCK_S = 0.2
N_BLOCKS = 15
MIN_BLOCKS = 5
MAX_BLOCKS_S = 30.0  # a slow model is measured in fewer blocks
PROGRESS_EVERY_S = 0.2


def tell_progress(send: Answer, expected_s: float) -> Callable[[], None]:
    """Return a function that tells the parent now and then how much of the expected time has passed."""
    begin_s = told_s = time.monotonic()

    def tell() -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= PROGRESS_EVERY_S:
            told_s = now_s
            done_s = now_s - begin_s
            send({"progress": [round(1000 * done_s), round(1000 * max(expected_s, done_s))]})

    return tell


def run(message: Mapping[str, Any], send: Answer) -> None:
    """Measure the model that ``message`` asks for and send the figures.

    Raises:
        FulltiltError: the model cannot be built or measured. Errors of the user's code pass through.
    """
    load = decode(Load, message["load"])
    if message["device"] != "cpu":
        torch.cuda.init()  # peak statistics need an initialised CUDA context
    model = ServedModel(
        config_from_values(message["config"], base_dir=message["base_dir"], provenance=message["provenance"]),
        device=message["device"],
        samples_per_request=load.samples_per_request,
        weights=Path(message["weights"]) if message["weights"] else None,
    )
    meter = MemoryMeter(message["device"])  # reading a checkpoint takes memory that serving does not
    meter.start()
    batch_s = warm_up(model.answer)
    levers = model.read_levers()
    tell = tell_progress(send, BLOCK_S * N_BLOCKS + load.expected_s)
    blocks = measure_blocks(model.answer, load.samples_per_request, batch_s, tell=tell)
    answers = []
    if load.requests_per_s is not None:
        each_s = sum(seconds for _, seconds in blocks) * load.samples_per_request / sum(n for n, _ in blocks)
        n_requests = plan_requests(load, each_s)
        arrivals_s = draw_arrivals_s(n_requests, load.requests_per_s, seed=load.seed)
        tell = tell_progress(send, max(arrivals_s[-1], n_requests * each_s))
        answers = serve(arrivals_s, model.answer, tell=tell)
    figures = Figures(
        call_s=tuple(answer.call_s for answer in answers),
        response_s=tuple(answer.response_s for answer in answers),
        block_samples=tuple(n_samples for n_samples, _ in blocks),
        block_s=tuple(seconds for _, seconds in blocks),
        memory_peak_gib=meter.stop().device_peak_gib,
    )
    said = {"weights": model.weights, "levers": levers, "notes": model.notes, "n_parameters": model.n_parameters}
    send({"measured": {"figures": encode(figures), "inputs": model.dataset_name, **encode(said)}})


def warm_up(answer: Callable[[], float], *, clock: Callable[[], float] = time.perf_counter) -> float:
    """Answer requests until caches, pools and compiled code are warm, and return the seconds of the last one."""
    begin_s = last_s = clock()
    n_done, batch_s = 0, 0.0
    while n_done < MIN_WARM_UP or last_s - begin_s < WARM_UP_S:
        answer()
        now_s = clock()
        batch_s, last_s = now_s - last_s, now_s
        n_done += 1
    return batch_s


def measure_blocks(
    answer: Callable[[], float],
    n_samples: int,
    batch_s: float,
    *,
    tell: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """Time blocks of requests sent back to back, and return the samples and seconds of each block."""
    n_batches = max(1, math.ceil(BLOCK_S / max(batch_s, 1e-6)))
    blocks: list[tuple[int, float]] = []
    first_s = clock()
    while len(blocks) < MIN_BLOCKS or (len(blocks) < N_BLOCKS and clock() - first_s < MAX_BLOCKS_S):
        begin_s = clock()
        for _ in range(n_batches):
            answer()
        blocks.append((n_batches * n_samples, clock() - begin_s))
        tell()
    return blocks
