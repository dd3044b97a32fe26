"""What happens inside a trial process: build the run, measure it, answer in JSON lines.

The zygote calls ``serve_request``; by hand it is ``python -m fulltilt.tuner.trials.trial < request.json``, where the
request is one encoded ``TrialRequest`` (with ``"kind": "facts"`` for the probe). Answers, one object a line:
``{"progress": {…}}`` whenever a block of steps is done, then one of ``{"measurement": {…}}``,
``{"facts": {…}, "workload": {…}}`` and ``{"failure": {"exception_type", "message", "traceback"}}``.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import faulthandler
import importlib
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.levers.compile import keep_cache
from fulltilt.records import Measurement, TrialRequest, decode, encode

Answer = Callable[[Mapping[str, Any]], None]
Body = Callable[[Mapping[str, Any], Answer], None]

TRIAL_VARIABLE = "FULLTILT_TRIAL"
DEFAULT_BODY = "fulltilt.tuner.trials.trial:run_request"
TRACEBACK_LIMIT_CHARS = 20000
PROGRESS_INTERVAL_S = 0.25
FAILURE_ATTEMPTS = 5


def refuse_inside_trial(call: str) -> None:
    """Raise UsageError when this process is a trial: a search inside a trial would never end."""
    if trial := os.environ.get(TRIAL_VARIABLE):
        raise UsageError(
            f"{call} was called inside trial {trial} (the trial imported the code that calls it); "
            'put the call under if __name__ == "__main__":'
        )


def run_request(message: Mapping[str, Any], answer: Answer) -> None:
    request, kind = decode(TrialRequest, message), message.get("kind", "trial")
    if kind == "facts":
        run_facts(request, answer)
    elif kind == "trial" and request.rank_devices:
        from fulltilt.tuner.trials.rank_trial import run_rank_trial

        run_rank_trial(request, answer)
    elif kind == "memory":
        run_memory_probe(request, answer)
    elif kind == "roofs":
        run_roofs(request, answer)
    else:
        run_trial(request, answer, kind)


def run_trial(request: TrialRequest, answer: Answer, kind: str = "trial") -> None:
    """Measure one plan in this process, or the part of it that ``kind`` names, and answer with the Measurement.

    Raises:
        FulltiltError: the workload cannot be built or measured; and whatever the user's code raises.
    """
    from fulltilt.engine.measured.measurement import run_measured
    from fulltilt.engine.measured.probes import run_device_probe, run_loader_probe, use_share_of_cores

    measure = {"trial": run_measured, "device": run_device_probe, "loader": run_loader_probe}[kind]
    given = {} if kind == "loader" else {"on_part": report_parts(answer)}
    if request.rank_devices:
        use_share_of_cores(len(request.rank_devices))
    with build_request(request, answer) as run:
        answer({"measurement": encode(measure_built(measure, run, request, answer, **given))})


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


def run_memory_probe(request: TrialRequest, answer: Answer) -> None:
    """Estimate the memory of one plan without a step and answer with a Measurement of that figure."""
    from fulltilt.engine.measured import probes

    with build_request(request, answer) as run:
        answer({"measurement": encode(probes.run_memory_probe(run))})


def run_roofs(request: TrialRequest, answer: Answer) -> None:
    """Measure what this device reaches at matmul and copy, in a process like a trial's."""
    from fulltilt.measure import measure_roofs

    answer({"roofs": encode(measure_roofs(request.device))})


def run_facts(request: TrialRequest, answer: Answer) -> None:
    """Build the run without a step and answer with what guards, the report and a promise need to know of it."""
    from fulltilt.engine.build.facts import describe_data, name_device, name_model

    with build_request(request, answer) as run:
        refuse_ranks(request, run)
        model = run.setup.model
        optimizer = run.setup.optimizer
        workload = {
            "name": run.workload.name,
            "model": name_model(model),
            "n_parameters": sum(p.numel() for p in model.parameters()),
            "n_samples": run.n_samples,
            "data": describe_data(run.dataset, run.facts),
            "device_name": name_device(run.device),
            "optimizer": type(optimizer).__name__,
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "notes": list(run.notes),
        }
        answer({"facts": encode(run.facts), "workload": workload})


def refuse_ranks(request: TrialRequest, run: Any) -> None:
    """Before the first of many trials that would all say so.

    Raises:
        UsageError: the run cannot be divided over the ranks of the request, whatever the plan.
    """
    from fulltilt.engine.ranks.division import find_obstacles

    n_ranks = max(1, len(request.rank_devices))
    if obstacles := find_obstacles(run, n_ranks, batch_size=n_ranks):
        raise UsageError("; ".join(obstacles))


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


def serve_request(request: int, answers: int, *, scratch: str, body: str = DEFAULT_BODY) -> int:
    """Read one request, run it, answer; returns the exit code. This is the boundary of the process."""
    faulthandler.enable()
    keep_cache()  # before TMPDIR moves: trials and training runs share what was compiled
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    _restore_blas_threads()
    with os.fdopen(answers, "wb", buffering=0) as stream:

        def answer(message: Mapping[str, Any]) -> None:
            line = json.dumps({**message, "time_s": time.time()}, allow_nan=False, ensure_ascii=False)
            # Names of files that are no UTF-8 reach messages as lone surrogates, which no journal can hold.
            stream.write(line.encode(errors="replace") + b"\n")

        with os.fdopen(request, "rb") as source:
            message = json.loads(source.read())
        os.environ[TRIAL_VARIABLE] = str(message.get("id", "?"))
        return _run_body(message, answer, body)


def _run_body(message: Mapping[str, Any], answer: Answer, body: str) -> int:
    try:
        sys.path[:0] = [p for p in message.get("source", {}).get("import_paths", ()) if p not in sys.path]
        module, _, name = body.partition(":")
        getattr(importlib.import_module(module), name)(message, answer)
        return 0
    except BaseException as error:  # process boundary: user code may raise anything, the parent has to learn what
        failure = error
    for _ in range(FAILURE_ATTEMPTS):
        try:
            # torch's handler raises whenever a dead data worker is noticed, also while its death is being told.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _lift_memory_limit()
            text = "".join(traceback.format_exception(failure))
            # Without a reader, or without room for the log, the other way of telling is still open.
            with contextlib.suppress(OSError, ValueError):
                answer({"failure": describe_failure(failure, text)})
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)
            break
        except RuntimeError as again:
            failure = again
    return 1


def _lift_memory_limit() -> None:
    """What ran out of memory is still held by the frames of the traceback; telling of it needs some more."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def describe_failure(error: BaseException, text: str) -> dict[str, str]:
    name = type(error).__name__
    return {
        "exception_type": name,
        "exception_types": " ".join(_list_types(error)),
        "message": (_read_message(error) or name)[:TRACEBACK_LIMIT_CHARS],
        "traceback": text[-TRACEBACK_LIMIT_CHARS:],
    }


def _read_message(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception as own:  # process boundary: a user's __str__ may raise anything
        return f"its message cannot be read ({type(own).__name__})"


def _list_types(error: BaseException) -> list[str]:
    """Class and base classes of an exception, and of what it was raised from: a wrapped out-of-memory is still one."""
    names: dict[str, None] = {}
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        names |= dict.fromkeys(cls.__name__ for cls in type(cause).__mro__ if issubclass(cls, BaseException))
        cause = cause.__cause__
    return list(names)


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


def _restore_blas_threads() -> None:
    """Give numpy's OpenBLAS the threads it would have had; the zygote loaded it with one."""
    wanted = int(os.environ.get("OPENBLAS_NUM_THREADS") or os.environ.get("OMP_NUM_THREADS") or 0)
    maps = Path("/proc/self/maps").read_text()
    files = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line and ".so" in line}
    for file in files:
        library = ctypes.CDLL(file)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if function := getattr(library, name, None):
                function(wanted or len(os.sched_getaffinity(0)))
                break


def main() -> int:
    """One request on stdin, answers on stdout."""
    with tempfile.TemporaryDirectory(prefix="fulltilt-") as scratch:
        answers = os.dup(1)
        os.dup2(2, 1)  # what user code prints must not mix with the answers
        return serve_request(os.dup(0), answers, scratch=scratch)


if __name__ == "__main__":
    sys.exit(main())
