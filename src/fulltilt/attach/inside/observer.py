"""``Observer``: records each training step of one process and writes the report into the session's folder."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from time import perf_counter_ns

import torch

from . import samples, torch_calls
from .blocks import N_WARM_UP, REMOVED, Blocks
from .files import FileCalls
from .sites import Sites
from .spans import Spans
from .user_code import find_user_frame

FLUSH_EVERY_STEPS, FLUSH_EVERY_NS = 20, 2 * 10**9  # whichever comes first: a signal may end the script at any time
N_CALIBRATION = 200


class Observer:
    """Records what one process of the script does, step by step.

    Attributes:
        thread: The thread whose calls are timed: the one that imported torch, then the one that takes steps.
        step: Number of optimizer steps so far.
        is_disturbed: The observer traced the current step, so the step is not counted.
    """

    def __init__(self, session):
        self.folder = session["folder"]
        self._proves = session["proves"] and sys.version_info >= (
            3,
            11,
        )  # in older versions pathlib bypasses the guards of files
        self.pid, self.thread = os.getpid(), threading.get_ident()
        self.spans, self.syncs, self.waits = Spans(), Sites("host_sync"), Sites("data_wait")
        self.files = FileCalls(self, self.folder)
        self._all_sites = self.syncs, self.waits, self.files.sites
        self._blocks = Blocks()
        self.step = 0
        self.is_disturbed = self._is_edge = False
        self._began_ns = self._own_ns = 0
        self._rows, self._flushed_ns = [], 0
        self.is_in_module = False
        self._n_batches = 0  # taken in the current step
        self._batches_left = None  # in the epoch; None: unknown

    def attach(self):
        torch_calls.wrap_optimizers(self)
        torch_calls.wrap_loader(self)
        torch_calls.wrap_modules(self)
        torch_calls.wrap_backward(self)
        torch_calls.wrap_synchronising(self)
        samples.wrap_fetch(self)
        self.files.wrap_open()
        os.register_at_fork(after_in_child=self._leave_child_alone)
        atexit.register(self._end)

    def _leave_child_alone(self):
        """Stop observing in a forked process, such as a data worker: it takes no steps."""
        self.thread = None

    def begin_batch(self, batches_left):
        """Note that a batch is asked for, after which ``batches_left`` follow in this epoch."""
        self._n_batches += 1
        self._batches_left = batches_left

    def note_wait(self, took_ns):
        frame = find_user_frame(2)
        if frame is not None:
            self.waits.find(frame, "next").add(took_ns)

    def leave_out(self, ns):
        """Subtract ``ns`` of the observer's own work from the current step."""
        self._began_ns += ns
        self.spans.leave_out(ns)

    def end_epoch(self):
        """Note the end of an epoch; the current step then holds more than a plain step."""
        self._is_edge = True
        self.files.is_removed = False
        self.files.settle()

    def end_step(self, is_edge):
        """Record the step that the optimizer's update has just ended, and plan the next."""
        try:
            if is_edge:
                self.end_epoch()
            self._end_step(perf_counter_ns())
        except Exception as error:  # an error of the observer must never reach the script
            self._give_up(error)

    def _give_up(self, error):
        self.thread = None
        self.files.is_removed = False
        self.files.settle()
        with contextlib.suppress(OSError):
            self.emit({"kind": "failed", "error": f"{type(error).__name__}: {error}"})

    def _end_step(self, now_ns):
        totals_ns = self.spans.cut(now_ns)
        counts = bool(self.step) and self._book(now_ns - self._began_ns, totals_ns)
        for sites in self._all_sites:
            sites.end_step(counts)
        self.step += 1
        if self.step == 1:
            self._begin_steps()
        self._plan_next()
        if len(self._rows) >= FLUSH_EVERY_STEPS or now_ns - self._flushed_ns > FLUSH_EVERY_NS:
            self._flush()
            self._flushed_ns = now_ns
        self._is_edge = self.is_disturbed = False
        self._n_batches = 0
        self._began_ns = perf_counter_ns()
        self._own_ns += self._began_ns - now_ns
        self.spans.go_on(self._began_ns)

    def _begin_steps(self):
        """Begin to record after the first step; what the script does before it is set-up."""
        self.files.wrap_dumps()
        self.emit(
            {
                "kind": "start",
                "pid": self.pid,
                "argv": sys.argv,
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "device": "cuda" if torch.cuda.is_initialized() else "cpu",
                "span_ns": self._calibrate(),
            }
        )

    def _calibrate(self):
        """Measure the host time that observing one call costs."""
        spans, sites, frame = Spans(), Sites("calibration"), sys._getframe()
        began_ns = perf_counter_ns()
        for _ in range(N_CALIBRATION):
            find_user_frame(0)
            spans.enter(0)
            sites.find(frame, "call").add(spans.leave())
        return (perf_counter_ns() - began_ns) / N_CALIBRATION

    def _book(self, wall_ns, totals_ns):
        """Record a step, and return whether it is a plain one, in the sense of ``Observation.plain``."""
        blocks = self._blocks
        flags = 1 * self._is_edge + 2 * self.is_disturbed
        place = [blocks.round, blocks.block, blocks.arm, int(blocks.is_timed)]
        self._rows.append([wall_ns, *totals_ns, flags, *place])
        if not self._is_edge and self._proves:
            self.files.end_step(wall_ns)
        is_settling = blocks.block and not blocks.is_timed
        return self.step > N_WARM_UP and not flags and blocks.arm != REMOVED and not is_settling

    def _plan_next(self):
        blocks = self._blocks
        if self.files.is_comparable and not blocks.was_started:
            blocks.start()
        elif not self.files.is_comparable:
            blocks.stop()
        left = None if self._batches_left is None else self._batches_left // max(1, self._n_batches)
        blocks.plan_step(self._is_edge, left)
        self.files.is_removed = blocks.arm == REMOVED

    def emit(self, record):
        """Append one line to this process's report."""
        path = os.path.join(self.folder, f"seen-{os.getpid()}.jsonl")
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, json.dumps(record).encode() + b"\n")
        finally:
            os.close(handle)

    def _flush(self):
        self.emit({"kind": "steps", "rows": self._rows})
        self._rows = []
        self.emit(self._summarize())

    def _summarize(self):
        """Summarize the whole run so far; the last such line of a report counts."""
        sites = [site for some in self._all_sites for site in some.list()]
        return {
            "kind": "summary",
            "n_steps": self.step,
            "n_spans": self.spans.n_entered,
            "own_ns": self._own_ns,
            "sites": sites,
            "target": self.files.target,
            "refused": self.files.refused,
        }

    def _end(self):
        if os.getpid() != self.pid:
            return
        self.thread = None  # later writes are not held back
        self.files.is_removed = False
        self.files.settle()
        if self.step:
            with contextlib.suppress(OSError):
                self._flush()
