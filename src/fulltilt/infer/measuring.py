"""Build the model or open an artefact, warm it up and measure it, in the measuring process.

The process only infers, so its memory is that of inference. It answers with one object a line:
``{"progress": {"done", "total"}}``, then ``{"measured": {…}}`` or ``{"failure": {…}}``.
"""

import dataclasses
import functools
import itertools
import math
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulltilt.config import config_from_values, inference_plan_of, plan_of
from fulltilt.errors import FulltiltError, PlanObstacleError, UsageError
from fulltilt.hardware import read_rss_bytes, watch_peak_bytes
from fulltilt.infer.artefact import open_artefact
from fulltilt.infer.gates.accuracy import compare_outputs
from fulltilt.infer.gates.effect import is_eager
from fulltilt.infer.joining import Sample
from fulltilt.infer.load import loop
from fulltilt.infer.load.arrivals import cut_prompt, plan_arrivals
from fulltilt.infer.targets import QUANTILES, Figures, Load, Target, count_at_most, examine_target, judge
from fulltilt.levers import find_obstacles, load_inference_catalogue
from fulltilt.levers.precision import resolve
from fulltilt.records import decode, encode
from fulltilt.tuner.trials.measuring import Answer

if TYPE_CHECKING:
    from fulltilt.infer.generate.decoding import Writer

TRAINING = ("channels_last", "compile")  # levers of speed that training alone has
N_JUDGED = 16  # samples that eager fp32 answers too, where the plan is another
N_SAMPLES = 256  # that requests take turns with, as many as an artefact keeps
MEMORY_EVERY_S = 0.05
WARM_UP_S = 1.0
MIN_WARM_UP = 3
BLOCK_S, N_BLOCKS, MIN_BLOCKS = 0.2, 15, 5
MAX_BLOCKS_S = 30.0  # a slow model is measured in fewer blocks
FIRST_TEST, LOOK_GROWTH = 50, 1.1  # requests


class Requests:
    """Answers requests with real samples, one after the other, as a server does: joined, run and split.

    Attributes:
        said: What the parent is told of the model.
        first_s: Of each request for text, the seconds from its begin to its first word.
    """

    def __init__(
        self, run: Callable[[list[Sample]], Any], samples: Sequence[Sample], n_samples: int, said: Mapping[str, Any]
    ):
        self.run, self._samples, self._n, self.said = run, itertools.cycle(samples), n_samples, said
        self.first_s: list[float] = []

    def answer(self) -> float:
        """Answer the next request and return the seconds it took."""
        samples = list(itertools.islice(self._samples, self._n))
        begin_s = time.perf_counter()
        self.run(samples)
        return time.perf_counter() - begin_s


class TextRequests(Requests):
    """Answers requests by writing on from prompts: beginnings of samples, an eighth to a half, by a fixed seed.

    Raises:
        UsageError: no prompt fits with its continuation.
    """

    def __init__(self, writer: "Writer", samples: Sequence[Sample], load: Load, said: Mapping[str, Any]):
        room = None if writer.max_length is None else writer.max_length - load.new_tokens
        if room is not None and room < 1:
            raise UsageError(
                f"targets.new_tokens {load.new_tokens} leaves no word for a prompt: the model was trained on texts of "
                f"{writer.max_length}; ask for fewer"
            )
        inputs = f"{said['inputs']}, cut to prompts, {load.new_tokens} new words each"
        super().__init__(self._write, samples, load.samples_per_request, {**said, "inputs": inputs})
        self._writer, self._n_new, self._room, self._draws = writer, load.new_tokens, room, random.Random(load.seed)

    def _write(self, samples: Sequence[Sample]) -> None:
        prompts = [cut_prompt(words.tolist(), self._draws)[: self._room] for words, *_ in samples]
        times_s: list[float] = []
        begin_s = time.perf_counter()
        self._writer(prompts, self._n_new, lambda words: times_s.append(time.perf_counter() - begin_s))
        self.first_s.append(times_s[0])
        if len(times_s) != self._n_new:
            raise FulltiltError(f"the model wrote {len(times_s)} words of {self._n_new}; lower targets.new_tokens")


def run(message: Mapping[str, Any], send: Answer) -> None:
    """Measure what ``message`` asks for and send the figures.

    Raises:
        FulltiltError: the model cannot be built or measured. Errors of the user's code pass through.
    """
    message = message["given"]
    load = decode(Load, message["load"])
    targets = [decode(Target, target) for target in message["targets"]]
    requests = open_model(message, load)
    stop_meter = start_meter(message["device"])  # reading a checkpoint takes memory that serving does not
    batch_s = warm_up(requests.answer)
    blocks = measure_blocks(requests.answer, load.samples_per_request, batch_s, send=send)
    figures = Figures(block_samples=tuple(n for n, _ in blocks), block_s=tuple(seconds for _, seconds in blocks))
    if load.n_requests:
        requests.first_s.clear()
        stop = Stopping(targets, load, figures, requests.first_s, send)
        arrivals_s = plan_arrivals(load.scenario, count_at_most(load), load.requests_per_s, seed=load.seed)
        figures = stop.build_figures(loop.serve(arrivals_s, requests.answer, is_enough=stop))
    peak_gib, mean_gib = stop_meter()
    figures = dataclasses.replace(figures, memory_peak_gib=peak_gib, memory_mean_gib=mean_gib)
    send({"measured": {"figures": encode(figures), **encode(requests.said)}})


def open_model(message: Mapping[str, Any], load: Load) -> Requests:
    """Build the model of a configuration, with the levers of inference that it states. Imports torch.

    Raises:
        UsageError: a lever cannot apply, or the engine is one that ``infer search`` builds.
    """
    if message.get("artefact"):
        return open_built(Path(message["artefact"]), load)
    from fulltilt.infer.engines._torch import apply_levers
    from fulltilt.infer.generate.decoding import find_writer
    from fulltilt.infer.model import build_inference_model

    config = config_from_values(message["config"], base_dir=message["base_dir"], provenance=message["provenance"])
    weights = Path(message["weights"]) if message["weights"] else None
    model = build_inference_model(config, device=message["device"], weights=weights, n_samples=N_SAMPLES)
    plan = inference_plan_of(config)
    precision, note = resolve(plan["precision"], model.facts)
    plan, notes = plan.replace(precision=precision), [*model.notes, *([note] if note else [])]
    notes += [f"speed.{name} is of training, it is not in force here" for name in TRAINING if plan_of(config)[name]]
    obstacles = find_obstacles(plan, model.facts, load_inference_catalogue())
    if plan["engine"] != "eager" or plan["cuda_graphs"]:
        obstacles.append(f"engine={plan['engine']}, cuda_graphs={plan['cuda_graphs']}: infer search builds them")
    if obstacles:
        raise PlanObstacleError("; ".join(obstacles))
    fp32 = None if is_eager(plan) else model.answer(model.samples[:N_JUDGED])
    setup = apply_levers(model.module, plan, model.device)
    answer = dataclasses.replace(model, module=setup.model).answer
    if fp32 is not None:
        sqnr_db, _ = compare_outputs(fp32, answer(model.samples[:N_JUDGED]))
        notes.append(f"the error is {sqnr_db:.0f} dB below the answers of eager fp32")
        if sqnr_db < config.inference.min_sqnr_db:
            raise UsageError(f"{notes[-1]}, inference.min_sqnr_db asks for {config.inference.min_sqnr_db:g}")
    said = {"inputs": model.data, "weights": model.weights, "notes": notes, "n_parameters": model.n_parameters}
    said["levers"] = {name: lever.observe(setup) for name, lever in load_inference_catalogue().items()}
    if (writer := find_writer(setup.model)) is not None:
        return TextRequests(writer, model.samples, load, said)
    if config.targets.first_token_s or config.targets.tokens_per_s:
        raise UsageError(
            f"targets.first_token_s and tokens_per_s are of models that write text; {config.task} does not"
        )
    return Requests(answer, model.samples, load.samples_per_request, said)


def open_built(folder: Path, load: Load) -> Requests:
    """Open an artefact. Imports torch only where its engine does, so its memory is that of its service.

    Raises:
        UsageError: eager would answer in its place.
    """
    artefact = open_artefact(folder)
    if artefact.notes:
        raise UsageError(f"nothing was measured, since {'; '.join(artefact.notes)}")
    found, metrics = artefact.manifest.accuracy, dict[str, Any]()
    notes = ["device, levers and model are the artefact's; requests are answered one after the other, none joined"]
    if found is not None:
        metrics = {found.metric: found.metric_here} if found.metric else metrics
        notes.append(f"the error is {found.sqnr_db:.0f} dB below the answers of eager fp32")
    said = {"inputs": "artefact's own", "notes": notes, "levers": dict(artefact.plan)}
    said |= {"weights": {"checkpoint": str(folder), "kind": "artefact", "metrics": metrics}}
    said |= {"n_parameters": artefact.manifest.n_parameters}
    return Requests(artefact.answer, artefact.samples, load.samples_per_request, said)


def start_meter(device: str) -> Callable[[], tuple[float, float]]:
    """Begin to watch memory → returns its peak and mean in GiB: of the allocator or the process.

    The peak is the allocator's or the kernel's own; the mean is one of readings, which cost 15 µs each.
    """
    read_peak, read = watch_peak_bytes(device), functools.partial(read_rss_bytes, os.getpid())
    if device != "cpu":
        import torch

        read = functools.partial(torch.cuda.memory_reserved, device)
    readings, is_over = [read() or 0], threading.Event()

    def sample() -> None:
        while not is_over.wait(MEMORY_EVERY_S):
            readings.append(read() or 0)

    threading.Thread(target=sample, name="memory", daemon=True).start()

    def stop() -> tuple[float, float]:
        is_over.set()
        return read_peak() / 2**30, statistics.fmean(readings) / 2**30

    return stop


class Stopping:
    """Decides when a load has told enough; looks seldom, since a look makes the next request wait.

    The test may be asked at every look. The intervals may not: they are once, when the planned requests are through,
    and by the parent at the end.
    """

    def __init__(self, targets: Sequence[Target], load: Load, figures: Figures, first_s: Sequence[float], send: Answer):
        self._open = [target for target in targets if target.statistic in QUANTILES]
        self._load, self._figures, self._first_s, self._send = load, figures, first_s, send
        self._next_look = 1

    def __call__(self, answers: Sequence[loop.Answer]) -> bool:
        """Return whether all percentiles are decided; before the planned end, whether all are refused."""
        n, n_planned = len(answers), self._load.n_requests
        if n < self._next_look:
            return False
        self._send({"progress": {"done": n, "total": max(n, n_planned)}})
        self._next_look = math.ceil(LOOK_GROWTH * n)
        if n < n_planned:
            self._next_look = min(self._next_look, n_planned)
            if n < FIRST_TEST:
                return False
        figures = self.build_figures(answers)
        if n == n_planned:
            self._open = [t for t in self._open if judge(t, figures, self._load).verdict == "not proven"]
        decisions = {examine_target(target, figures, self._load) for target in self._open}
        return decisions == {"refused"} if n < n_planned else "undecided" not in decisions

    def build_figures(self, answers: Sequence[loop.Answer]) -> Figures:
        return dataclasses.replace(
            self._figures,
            call_s=tuple(answer.call_s for answer in answers),
            response_s=tuple(answer.response_s for answer in answers),
            first_token_s=tuple(a.start_s + s - a.due_s for a, s in zip(answers, self._first_s, strict=False)),
        )


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
    send: Answer,
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
        send({"progress": {"done": len(blocks), "total": N_BLOCKS}})
    return blocks
