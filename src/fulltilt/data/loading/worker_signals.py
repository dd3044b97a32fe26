"""Shield data workers from signals to the whole job, end them cleanly, and report those that hang.

``timeout``, Slurm, systemd and CI send SIGTERM to every process of a job. The main process finishes its step and saves,
and needs its workers until then. So workers ignore SIGTERM as long as their parent lives; where torch or
multiprocessing would end a worker by SIGTERM, SIGKILL is sent instead. A worker that hangs holds up all others, since
batches come in order, and torch waits for it without limit.

This file alone uses private parts of torch's loader; a test names each of them.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker, util
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch, signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fulltilt.hardware.proctree import set_death_signal

BROKEN_OFF = (ConnectionError, FileNotFoundError, EOFError)  # of a batch whose worker died on the way
FETCH_FILE = fetch.__file__  # what reads and joins a batch in the process that asks for it
SENDER = "QueueFeederThread"  # of multiprocessing's queues, one each
SEND_S = 3.0  # torch kills a worker that has not ended after 5 s
LAST = -10  # of a process' finalizers: after those that tell its queues to end
LOCK_S = 1.0  # a worker that lives holds torch's lock for microseconds
POLL_S = 5.0  # how often torch looks whether its workers live
PARENT_POLL_S = 1.0
LOST_S = 2.0  # a worker whose parent is gone is killed by then
LONG_WAIT_S = 15.0  # for one batch: less than until a rank is found to hang; workers may take seconds to start


class GuardedLoader(DataLoader):
    """Loads data by workers that ignore signals to the process group; a killed worker cannot make its shutdown hang.

    ``worker_init_fn`` has to call ``guard_worker``.

    Attributes:
        on_long_wait: Called once for each batch that does not come for ``LONG_WAIT_S``, with the seconds so far, the
            ids of the workers' processes, and the number of the one that has to send the batch, where torch knows it.
    """

    on_long_wait: Callable[[float, Sequence[int], int | None], None] | None = None

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        context = self.multiprocessing_context or multiprocessing
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # it unblocks SIGTERM when it starts, so it has to start before
        with _hold_sigterm(), _end_started_on_error():
            iterator = _Iterator(self)
            iterator._workers_done_event = _Done(iterator._workers_done_event)
            for worker in iterator._workers:
                worker._popen.terminate = functools.partial(_kill, id(iterator), worker._popen)
        return iterator


class _Iterator(_MultiProcessingDataLoaderIter):
    def __init__(self, loader: GuardedLoader):
        self._on_long_wait, self._waited_s = loader.on_long_wait, 0.0
        super().__init__(loader)

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except StopIteration:
            raise
        except Exception as error:
            error.data_iterator = self  # type: ignore[attr-defined]  # for explain_loader_error
            if isinstance(error, BROKEN_OFF):
                disarm(self)  # here: the handler's own error may come at any moment, and hide this one
            raise

    def _try_get_data(self, timeout: float | None = None) -> tuple[bool, Any]:
        before_s = self._waited_s
        has_come, data = super()._try_get_data(timeout or POLL_S)
        self._waited_s = 0.0 if has_come else before_s + (timeout or POLL_S)
        if before_s < LONG_WAIT_S <= self._waited_s and self._on_long_wait is not None:
            due_from = next(iter(self._task_info.get(self._rcvd_idx, ())), None)
            self._on_long_wait(self._waited_s, [worker.pid for worker in self._workers], due_from)
        return has_come, data

    def _shutdown_workers(self) -> None:
        if not hasattr(self, "_workers_status"):  # its construction failed, and its workers were ended
            with contextlib.suppress(ValueError):
                signal_handling._remove_worker_pids(id(self))
            return
        super()._shutdown_workers()
        for queue in self._index_queues:
            # A thread that is frozen at Python's exit while it frees a semaphore makes the resource tracker warn.
            if queue._thread is not None:
                queue._thread.join(LOCK_S)


def end_workers(iterator: Any) -> None:
    """End the workers of a loader's iterator, if it has any, also in the middle of an epoch."""
    if isinstance(iterator, _Iterator):
        iterator._shutdown_workers()


def list_workers(iterator: Any) -> list[Any]:
    """Return the worker processes of a loader's iterator."""
    return list(getattr(iterator, "_workers", ()))


def disarm(iterator: Any) -> None:
    """Remove the iterator's workers from torch's SIGCHLD handler, which may run meanwhile."""
    for _ in range(len(iterator._workers) + 1):
        try:
            if iterator._worker_pids_set:
                iterator._worker_pids_set = False
                signal_handling._remove_worker_pids(id(iterator))
            return
        except RuntimeError:
            iterator._worker_pids_set = True


class _Done:
    """Replaces, in the main process, the event by which workers are told to end.

    A worker that is killed while it polls the event never releases its lock, and the main process would wait for it.
    """

    def __init__(self, event: Any):
        self._event, self._is_set = event, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        is_free = self._event._cond.acquire(True, LOCK_S)
        self._event._flag.acquire(False)
        self._event._flag.release()
        if is_free:
            self._event._cond.release()


def guard_worker(parent: int | None = None) -> None:
    """Make a worker ignore SIGINT and SIGTERM, and end with its parent; call it at the worker's start.

    ``parent`` is the process that started the worker; None where a fork server did.
    """
    # Ctrl-C reaches the whole process group; the main process ends its workers itself, without their tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Programs that a dataset starts would inherit SIG_IGN, and do not inherit a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # a library may not resume a read that was interrupted
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if multiprocessing.get_start_method(allow_none=True) == "spawn":
        util.Finalize(None, _join_senders, exitpriority=LAST)
    elif threading.main_thread().name == "MainThread":  # the kernel's signal comes when the thread that forked ends
        set_death_signal(signal.SIGKILL)  # at once, or a thread that hands batches over writes a traceback
    sys.excepthook = functools.partial(_tell_unless_killed, sys.excepthook)
    watch = functools.partial(_end_after, os.getppid() if parent is None else parent)
    threading.Thread(target=watch, name="fulltilt-parent", daemon=True).start()


def _tell_unless_killed(tell: Callable[..., object], kind: type[BaseException], *error: Any) -> None:
    """Wait before a lost connection is told: a parent's sockets close shortly before its end is signalled."""
    if issubclass(kind, ConnectionError):
        time.sleep(LOST_S)
    tell(kind, *error)


def _join_senders() -> None:
    """Wait for the threads that send batches: Python's exit aborts the process where one is still inside torch."""
    for thread in threading.enumerate():
        if thread.name == SENDER:
            thread.join(SEND_S)


def _end_after(parent: int) -> None:
    """Kill this process once its parent is gone; torch's own check fails while a worker waits to send a batch."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _hold_sigterm() -> Iterator[None]:
    """Block SIGTERM, here and in processes that start in the block, which unblock it in ``guard_worker``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _end_started_on_error() -> Iterator[None]:
    """Kill the processes that were started in the block where it fails: Python would wait for them at its exit."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:  # a signal's too: raised again when the processes are gone
        started = [child for child in multiprocessing.active_children() if child not in before]
        while any(child.exitcode is None for child in started):
            with contextlib.suppress(RuntimeError):  # torch's, for each of them that ends
                for child in started:
                    child.kill()
                    child.join(LOCK_S)
        raise


def _kill(iterator_id: int, process: Any) -> None:
    """Kill a worker, removed from torch's list before, since torch would raise an error."""
    with contextlib.suppress(ValueError):  # removed already
        signal_handling._remove_worker_pids(iterator_id)
    process.kill()
