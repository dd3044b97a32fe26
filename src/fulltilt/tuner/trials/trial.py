"""Serve one request in a trial process: it comes in, answers go out as JSON lines.

The trial server calls ``serve_request``; by hand it is ``python -m fulltilt.tuner.trials.trial < request.json``, where
the request is one encoded ``TrialRequest``. Answers, one object a line: ``{"progress": {…}}`` now and then, then what
its kind answers (``kinds``), or ``{"failure": {"exception_type", "message", "traceback", …}}``.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt.errors import UsageError, find_place
from fulltilt.levers.compile import keep_cache
from fulltilt.tuner.trials.measuring import Answer, Link

TRIAL_VARIABLE = "FULLTILT_TRIAL"
DEFAULT_BODY = "fulltilt.tuner.trials.kinds:run_request"
TRACEBACK_LIMIT_CHARS = 20000
FAILURE_ATTEMPTS = 5


def refuse_inside_trial(call: str) -> None:
    """Raise UsageError when this process is a trial: a search inside a trial would never end."""
    if trial := os.environ.get(TRIAL_VARIABLE):
        raise UsageError(
            f"{call} was called inside trial {trial} (the trial imported the code that calls it); "
            'put the call under if __name__ == "__main__":'
        )


def serve_request(request: int, link: int, *, scratch: str, body: str = DEFAULT_BODY) -> int:
    """Read one request, run it, answer on ``link``, and return the exit code: the boundary of the process."""
    faulthandler.enable()
    keep_cache()  # before TMPDIR moves: trials and training runs share what was compiled
    os.environ["TMPDIR"] = scratch
    tempfile.tempdir = None
    _restore_blas_threads()
    with Link(link) as answer:
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
            # What ran out of memory is still held by the frames of the traceback; telling of it needs some more.
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
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


def describe_failure(error: BaseException, text: str) -> dict[str, str]:
    """Describe an exception, with its traceback ``text``, for the parent."""
    name = type(error).__name__
    try:
        said = str(error).strip() or name
    except Exception as own:  # process boundary: a user's __str__ may raise anything
        said = f"its message cannot be read ({type(own).__name__})"
    return {
        "exception_type": name,
        "exception_types": " ".join(_list_types(error)),
        "message": said[:TRACEBACK_LIMIT_CHARS],
        "place": find_place(error) or "",
        "traceback": text[-TRACEBACK_LIMIT_CHARS:],
    }


def _list_types(error: BaseException) -> list[str]:
    """List the classes of an exception and of its causes: a wrapped out-of-memory is still one."""
    names: dict[str, None] = {}
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        names |= dict.fromkeys(cls.__name__ for cls in type(cause).__mro__ if issubclass(cls, BaseException))
        cause = cause.__cause__
    return list(names)


def _restore_blas_threads() -> None:
    """Give numpy's OpenBLAS its usual threads; the server loaded it with one."""
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
    """Serve one request from stdin, with answers on stdout."""
    with tempfile.TemporaryDirectory(prefix="fulltilt-") as scratch:
        answers = os.dup(1)
        os.dup2(2, 1)  # what user code prints must not mix with the answers
        return serve_request(os.dup(0), answers, scratch=scratch)


if __name__ == "__main__":
    sys.exit(main())
