"""Find the lines of user code in which the loading of samples spends its time, by tracing a few batches."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from time import perf_counter_ns, time_ns

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from .user_code import is_user_file

TRACED = (2, 4)  # which fetches are traced; those between are timed without tracing
N_LINES_KEPT = 40


class LineTimes:
    """Charges time to the running line of user code, its calls into libraries included."""

    def __init__(self):
        self.lines = {}  # (code, line) → [ns, times reached]
        self._callers, self._current, self._since_ns = [], None, 0

    def start(self):
        self._callers, self._current, self._since_ns = [], None, perf_counter_ns()

    def trace(self, frame, event, arg):
        if not is_user_file(frame.f_code.co_filename):
            return None
        self._charge()
        self._callers.append(self._current)
        self._current = (frame.f_code, frame.f_lineno)
        self._since_ns = perf_counter_ns()
        return self._trace_lines

    def _trace_lines(self, frame, event, arg):
        self._charge()
        if event == "line":
            self._current = (frame.f_code, frame.f_lineno)
        elif event == "return":
            self._current = self._callers.pop() if self._callers else None
        self._since_ns = perf_counter_ns()
        return self._trace_lines

    def _charge(self):
        spent = self.lines.setdefault(self._current, [0, 0])
        spent[0] += perf_counter_ns() - self._since_ns
        spent[1] += 1

    def stop(self):
        self._charge()


def wrap_fetch(observer):
    """Trace some of the batches that this process or its data workers assemble."""
    original = fetch._MapDatasetFetcher.fetch
    done = _get_mark(observer)
    state = {"n": 0, "pid": os.getpid(), "times": LineTimes(), "plain_ns": []}

    @functools.wraps(original)
    def traced(fetcher, index):
        if state["pid"] != os.getpid():  # in a forked worker
            state.update(n=0, pid=os.getpid(), times=LineTimes(), plain_ns=[])
        if get_worker_info() is None and not observer.step:  # an evaluation, or the accumulation of the first step
            return original(fetcher, index)
        state["n"] += 1
        if state["n"] > TRACED[-1] or os.path.exists(done):
            return original(fetcher, index)
        if state["n"] not in TRACED or sys.gettrace() is not None:
            began_ns = perf_counter_ns()
            try:
                return original(fetcher, index)
            finally:
                state["plain_ns"].append(perf_counter_ns() - began_ns)
        observer.is_disturbed = True
        times = state["times"]
        times.start()
        sys.settrace(times.trace)
        try:
            return original(fetcher, index)
        finally:
            sys.settrace(None)
            times.stop()
            if state["n"] == TRACED[-1]:
                with contextlib.suppress(OSError):
                    os.close(os.open(done, os.O_CREAT, 0o600))
                    observer.emit(_describe(times, state["plain_ns"]))

    fetch._MapDatasetFetcher.fetch = traced


def trace_again(observer):
    """Let the workers of a loader that begins now trace their samples: those before it had others, as an evaluation."""
    with contextlib.suppress(OSError):
        os.unlink(_get_mark(observer))


def _get_mark(observer):
    return os.path.join(observer.folder, "samples-are-traced")


def _describe(times, plain_ns):
    total_ns = sum(ns for ns, _ in times.lines.values())
    lines = [
        [os.path.abspath(key[0].co_filename), key[1], _name_function(key[0]), ns, n]
        for key, (ns, n) in times.lines.items()
        if key is not None
    ]
    lines.sort(key=lambda line: -line[3])
    return {
        "kind": "samples",
        "at_ns": time_ns(),
        "is_worker": get_worker_info() is not None,
        "n_batches": len(TRACED),
        "total_ns": total_ns,
        "plain_ns": plain_ns,
        "lines": lines[:N_LINES_KEPT],
    }


def _name_function(code):
    """Return the name of the function around a comprehension (Python 3.11 and newer)."""
    name = getattr(code, "co_qualname", code.co_name)
    return name.partition(".<locals>.<")[0] if name.endswith(("comp>", "genexpr>")) else name
