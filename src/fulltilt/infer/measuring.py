"""Build the model or open the artefact, warm it up and measure it, in the measuring process.

torch is imported for what needs it: an artefact that does without is measured without. The process only infers, so its
memory is that of inference. It answers with one object a line: ``{"progress": {"done", "total"}}``, then
``{"measured": {…}}`` or ``{"failure": {…}}``.
"""

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.config import config_from_values
from fulltilt.errors import UsageError
from fulltilt.hardware import read_status_bytes
from fulltilt.infer.load import loop
from fulltilt.infer.load.arrivals import plan_arrivals
from fulltilt.infer.targets import (
    QUANTILES,
    Figures,
    Load,
    Target,
    count_at_most,
    examine_target,
    judge,
    plan_requests,
)
from fulltilt.records import decode, encode
from fulltilt.tuner.trials.measuring import Answer

WARM_UP_S = 1.0
MIN_WARM_UP = 3
BLOCK_S = 0.2
N_BLOCKS = 15
MIN_BLOCKS = 5
MAX_BLOCKS_S = 30.0  # a slow model is measured in fewer blocks
PROGRESS_EVERY_S = 0.2
FIRST_LOOK, LOOK_GROWTH = 50, 1.1


def tell_progress(send: Answer, expected_s: float) -> Callable[[], None]:
    """Return a function that tells the parent now and then how much of the expected time has passed."""
    begin_s = told_s = time.monotonic()

    def tell() -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= PROGRESS_EVERY_S:
            told_s = now_s
            done_s = now_s - begin_s
            send({"progress": {"done": round(1000 * done_s), "total": round(1000 * max(expected_s, done_s))}})

    return tell


class ServedArtefact:
    """Answers requests with the samples of an artefact, as a server would: joined, run and split."""

    dataset_name, weights = "artefact", None

    def __init__(self, folder: Path, samples_per_request: int):
        from fulltilt.infer.artefact import open_artefact

        self._artefact = artefact = open_artefact(folder)
        self.notes, self.n_parameters = list(artefact.notes), artefact.manifest.n_parameters
        self._samples, self._n = itertools.cycle(artefact.samples), samples_per_request

    def answer(self) -> float:
        """Answer the next request and return the seconds it took."""
        samples = list(itertools.islice(self._samples, self._n))
        begin_s = time.perf_counter()
        self._artefact.answer(samples)
        return time.perf_counter() - begin_s

    def read_levers(self) -> dict[str, Any]:
        return self._artefact.manifest.plan


def run(message: Mapping[str, Any], send: Answer) -> None:
    """Measure what ``message`` asks for and send the figures.

    Raises:
        FulltiltError: the model cannot be built or measured. Errors of the user's code pass through.
    """
    message = message["given"]
    load = decode(Load, message["load"])
    targets = [decode(Target, target) for target in message["targets"]]
    model = open_model(message, load)
    stop_meter = start_meter(message["device"])  # reading a checkpoint takes memory that serving does not
    batch_s = warm_up(model.answer)
    levers = model.read_levers()
    tell = tell_progress(send, BLOCK_S * N_BLOCKS + load.expected_s)
    blocks = measure_blocks(model.answer, load.samples_per_request, batch_s, tell=tell)
    figures = Figures(
        call_s=(),
        response_s=(),
        block_samples=tuple(n_samples for n_samples, _ in blocks),
        block_s=tuple(seconds for _, seconds in blocks),
        memory_peak_gib=0.0,
    )
    if load.n_requests:
        figures = measure_load(model, targets, load, figures, send)
    figures = dataclasses.replace(figures, memory_peak_gib=stop_meter())
    said = {"weights": model.weights, "levers": levers, "notes": model.notes, "n_parameters": model.n_parameters}
    send({"measured": {"figures": encode(figures), "inputs": model.dataset_name, **encode(said)}})


def open_model(message: Mapping[str, Any], load: Load) -> Any:
    """Open the artefact that is asked for, or build the model as training does."""
    if message.get("artefact"):
        return ServedArtefact(Path(message["artefact"]), load.samples_per_request)
    import torch

    from fulltilt.infer.generate.decoding import find_generate
    from fulltilt.infer.generate.requests import TextRequests
    from fulltilt.infer.served import ServedModel

    if message["device"] != "cpu":
        torch.cuda.init()  # peak statistics need an initialised CUDA context
    config = config_from_values(message["config"], base_dir=message["base_dir"], provenance=message["provenance"])
    model = ServedModel(
        config,
        device=message["device"],
        samples_per_request=load.samples_per_request,
        weights=Path(message["weights"]) if message["weights"] else None,
    )
    if find_generate(model.module) is not None:
        return TextRequests(model, new_tokens=load.new_tokens, seed=load.seed)
    if config.targets.first_token_s or config.targets.tokens_per_s:
        raise UsageError(
            f"targets.first_token_s and tokens_per_s are of models that write text; {config.task} does not"
        )
    return model


def start_meter(device: str) -> Callable[[], float]:
    """Begin to watch memory → what returns its peak in GiB; without torch that of the whole process."""
    if "torch" not in sys.modules:
        return lambda: (read_status_bytes("VmHWM") or 0) / 2**30
    from fulltilt.measure import MemoryMeter

    meter = MemoryMeter(device)
    meter.start()
    return lambda: meter.stop().device_peak_gib


def measure_load(model: Any, targets: Sequence[Target], load: Load, figures: Figures, send: Answer) -> Figures:
    """Send the planned requests, and more of them where they leave a percentile open."""
    each_s = figures.seconds_per_request(load)
    n_planned = plan_requests(load, each_s)
    expected_s = n_planned * max(each_s, 1 / load.requests_per_s if load.requests_per_s else 0.0)
    arrivals_s = plan_arrivals(load.scenario, count_at_most(load, n_planned), load.requests_per_s, seed=load.seed)
    first_s: list[float] = getattr(model, "first_s", [])
    first_s.clear()
    stop, tell = Stopping(targets, load, figures, n_planned, first_s), tell_progress(send, expected_s)

    def is_enough(answers: Sequence[loop.Answer]) -> bool:
        tell()
        return len(answers) >= stop.next_look and stop.look(answers)

    return stop.build_figures(loop.serve(arrivals_s, model.answer, is_enough=is_enough))


class Stopping:
    """Decides when a load has told enough; looks seldom, since a look makes the next request wait.

    The test may be asked at every look. The intervals may not: they are once, when the planned requests are through,
    and by the parent at the end.
    """

    def __init__(
        self, targets: Sequence[Target], load: Load, figures: Figures, n_planned: int, first_s: Sequence[float] = ()
    ):
        self._first_s = first_s
        self._open = [target for target in targets if target.statistic in QUANTILES]
        self._load, self._figures, self._n_planned = load, figures, n_planned
        self.next_look = min(FIRST_LOOK, n_planned)

    def build_figures(self, answers: Sequence[loop.Answer]) -> Figures:
        return dataclasses.replace(
            self._figures,
            call_s=tuple(answer.call_s for answer in answers),
            response_s=tuple(answer.response_s for answer in answers),
            first_token_s=tuple(a.start_s + s - a.due_s for a, s in zip(answers, self._first_s, strict=False)),
        )

    def look(self, answers: Sequence[loop.Answer]) -> bool:
        """Return whether all percentiles are decided; before the planned end, whether all are refused."""
        n, figures = len(answers), self.build_figures(answers)
        if n < self._n_planned:
            self.next_look = min(math.ceil(LOOK_GROWTH * n), self._n_planned)
            decisions = {examine_target(target, figures, self._load) for target in self._open}
            return decisions == {"refused"}
        if self.next_look == self._n_planned:
            self._open = [t for t in self._open if judge(t, figures, self._load).verdict == "not proven"]
        self.next_look = math.ceil(LOOK_GROWTH * n)
        return all(examine_target(target, figures, self._load) != "undecided" for target in self._open)


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
