"""How a trial process builds the run that a request asks for, and measures it."""

from __future__ import annotations

import base64
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fulltilt.records import Measurement, TrialRequest

Answer = Callable[[Mapping[str, Any]], None]

PROGRESS_INTERVAL_S = 0.25


def measure_built(
    measure: Callable[..., Measurement], run: Any, request: TrialRequest, answer: Answer, **given: Any
) -> Measurement:
    """``measure`` a built run as the request asks for, saying how far it is."""
    answer({"progress": {"stage": "built"}})
    with explain_workers():
        return measure(
            run,
            n_steps=request.n_steps,
            max_measure_s=request.max_measure_s,
            on_progress=report_steps(answer),
            **given,
        )


@contextlib.contextmanager
def explain_workers() -> Iterator[None]:
    """torch tells of a dead data worker from its signal handler, wherever the main thread happens to be."""
    from fulltilt.data import explain_loader_error

    try:
        yield
    except RuntimeError as error:
        explained = explain_loader_error(error)
        if explained is None or explained is error:
            raise
        raise explained from error


@contextlib.contextmanager
def build_request(
    request: TrialRequest, answer: Answer, *, device: str | None = None, world: Any = None
) -> Iterator[Any]:
    """A built run under the request's memory limit, closed at the end whatever happens.

    Args:
        device: Instead of the request's.
        world: The ranks that train together; None: this process alone.
    """
    from fulltilt.config import config_from_values
    from fulltilt.engine.build.builder import build_run
    from fulltilt.engine.ranks.world import ALONE
    from fulltilt.measure import apply_memory_limit

    source, device = request.source, device or request.device
    sys.path[:0] = [path for path in source.import_paths if path not in sys.path]
    config = config_from_values(source.config, base_dir=source.base_dir, provenance=source.provenance)
    workload = _unpickle(source.pickled)
    answer({"progress": {"stage": "configured"}})
    if request.memory_limit_bytes is not None:
        apply_memory_limit(device, request.memory_limit_bytes)
    run = build_run(config, request.plan, device=device, workload=workload, seed=request.seed, world=world or ALONE)
    try:
        yield run
    finally:
        run.close()


def _unpickle(pickled: str | None) -> Any:
    if pickled is None:
        return None
    import pickle

    import cloudpickle  # noqa: F401  (registers what its pickles need)

    return pickle.loads(base64.b64decode(pickled))


def report_parts(answer: Answer) -> Callable[[str], None]:
    """Says which part of a run is rehearsed, as it begins."""

    def report(part: str) -> None:
        answer({"progress": {"stage": "rehearsing", "part": part}})

    return report


def report_steps(answer: Answer) -> Callable[[int], None]:
    """A sign of life after a block of steps, not so often that whoever reads it takes cores from the trial."""
    last_s = -math.inf

    def report(n_steps: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= PROGRESS_INTERVAL_S:
            last_s = now_s
            answer({"progress": {"stage": "measuring", "n_steps": n_steps}})

    return report
