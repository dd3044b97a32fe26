"""Build the run that a request asks for, and measure it, in a trial process."""

import base64
import contextlib
import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

from fulltilt.records import Measurement, TrialRequest

Answer = Callable[[Mapping[str, Any]], None]  # a ``Link`` in a trial process
Measure = Callable[..., Measurement]

PROGRESS_INTERVAL_S = 0.25


class Link:
    """Sends answers to the process that watches this one, and takes its orders, as JSON lines."""

    def __init__(self, descriptor: int):
        self._stream = os.fdopen(descriptor, "r+b", buffering=0)

    def __call__(self, message: Mapping[str, Any]) -> None:
        line = json.dumps({**message, "time_s": time.time()}, allow_nan=False, ensure_ascii=False)
        # Names of files that are no UTF-8 reach messages as lone surrogates, which no journal can hold.
        self._stream.write(line.encode(errors="replace") + b"\n")

    def take_orders(self) -> Iterator[str]:
        """Yield each order as it comes, until the other side is gone."""
        for line in iter(self._stream.readline, b""):
            yield json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()


def measure_built(measure: Measure, run: Any, request: TrialRequest, answer: Answer) -> Measurement:
    """Measure a built run as the request asks for, and tell how far it is."""
    answer({"progress": {"stage": "built"}})
    with explain_workers():
        return measure(
            run, n_steps=request.n_steps, max_measure_s=request.max_measure_s, on_progress=report_steps(answer)
        )


def report_parts_of(measure: Measure, answer: Answer) -> Measure:
    """Have ``measure`` also tell which part of a run is rehearsed, as it begins."""
    return functools.partial(measure, on_part=lambda part: answer({"progress": {"stage": "rehearsing", "part": part}}))


@contextlib.contextmanager
def explain_workers() -> Iterator[None]:
    """Explain what ended a run as ``train`` does; torch tells of a dead worker by a signal, wherever the thread is."""
    from fulltilt.engine.loop.endings import explain_error

    try:
        yield
    except Exception as error:  # the boundary to the user's code: say where it failed
        explained = explain_error(error)
        if explained is None or explained is error:
            raise
        raise explained from error


@contextlib.contextmanager
def build_request(request: TrialRequest, answer: Answer, *, world: Any = None) -> Iterator[Any]:
    """Build the run of a request under its memory limit, and close it at the end whatever happens.

    Args:
        world: The ranks that train together; None: this process alone.
    """
    from fulltilt.config import config_from_values
    from fulltilt.engine.build.builder import build_run
    from fulltilt.engine.ranks.world import ALONE
    from fulltilt.measure import apply_memory_limit

    source, device = request.source, request.device
    sys.path[:0] = [path for path in source.import_paths if path not in sys.path]
    config = config_from_values(source.config, base_dir=source.base_dir, provenance=source.provenance)
    workload = None
    if source.pickled is not None:
        import cloudpickle  # what its pickles need is registered by the import

        workload = cloudpickle.loads(base64.b64decode(source.pickled))
    answer({"progress": {"stage": "configured"}})
    if request.memory_limit_bytes is not None:
        apply_memory_limit(device, request.memory_limit_bytes)
    run = build_run(
        config, request.plan, device=device, workload=workload, seed=request.seed, strict=not request.settles,
        world=world or ALONE,
    )  # fmt: skip
    with contextlib.closing(run):
        yield run


def report_steps(answer: Answer) -> Callable[[int], None]:
    """Build a report of steps as a sign of life, rare enough to take no cores from the trial."""
    last_s = -math.inf

    def report(n_steps: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= PROGRESS_INTERVAL_S:
            last_s = now_s
            answer({"progress": {"stage": "measuring", "n_steps": n_steps}})

    return report
