"""Data workers that are signalled, killed or stand still.

SIGTERM reaches the whole group, and the step in progress still needs its workers.

``timeout``, Slurm, systemd and CI signal every process of a job. The main process finishes its step and saves; a worker
that ends meanwhile breaks that step off. So workers hold SIGTERM back as long as the process that started them lives.
torch ends a worker that hangs by SIGTERM as well, and multiprocessing does at exit: for these it is SIGKILL instead.
A worker that stands still holds the others up, since batches come in their order, and torch waits for it for good.

This file alone touches private parts of torch's loader; a test names each of them.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

LOCK_S = 1.0  # a worker that lives holds torch's lock for microseconds
POLL_S = 5.0  # as torch looks whether its workers live
PARENT_POLL_S = 1.0
LONG_WAIT_S = 15.0  # for one batch: sooner than a rank is found to hang; workers may take seconds to start


class GuardedLoader(DataLoader):
    """A DataLoader whose workers a signal to the process group leaves alone, and which outlives a worker's death.

    ``worker_init_fn`` has to call ``guard_worker``.

    Attributes:
        on_long_wait: Called once for each batch that does not come for ``LONG_WAIT_S``, with the seconds so far, the
            ids of the workers' processes, and the number of the one that the batch is due from, where torch knows it.
    """

    on_long_wait: Callable[[float, Sequence[int], int | None], None] | None = None

    def _get_iterator(self) -> Any:
        if not self.num_workers:
            return super()._get_iterator()
        context = self.multiprocessing_context or multiprocessing
        if context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # it lets SIGTERM through when it starts; so before that is held back
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
            error.data_iterator = self  # type: ignore[attr-defined]  # whose workers say more than the message
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
        if not hasattr(self, "_workers_status"):  # it never became whole, and its workers were ended
            with contextlib.suppress(ValueError):
                signal_handling._remove_worker_pids(id(self))
            return
        super()._shutdown_workers()
        for queue in self._index_queues:
            # Its thread may hold the last reference to a semaphore: frozen at Python's exit after it unlinked that one
            # and before it said so, it makes the resource tracker warn of a leak.
            if queue._thread is not None:
                queue._thread.join(LOCK_S)


def end_workers(iterator: Any) -> None:
    """End the workers of a loader's iterator, in the middle of an epoch too; of one without workers nothing."""
    if isinstance(iterator, _Iterator):
        iterator._shutdown_workers()


def list_workers(iterator: Any) -> list[Any]:
    """The processes of a loader's iterator."""
    return list(getattr(iterator, "_workers", ()))


def disarm(iterator: Any) -> None:
    """Take the iterator's workers off torch's SIGCHLD handler, which may go off while this runs."""
    for _ in range(len(iterator._workers) + 1):
        try:
            if iterator._worker_pids_set:
                iterator._worker_pids_set = False
                signal_handling._remove_worker_pids(id(iterator))
            return
        except RuntimeError:
            iterator._worker_pids_set = True


class _Done:
    """Tells the workers that there is no more to do, in the main process, in place of the event that they poll.

    A worker that is killed while it polls takes the event's lock with it, and the main process then waited for that
    lock for good: once, in a test that kills a worker as the kernel does where memory runs out.
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
    """Call it in a worker, at its start.

    Args:
        parent: The process that started it, where it is a child of that one; of a fork server's children None.
    """
    # Ctrl-C reaches the whole process group; the main process ends its workers itself, without their tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler and not SIG_IGN, which the programs that a dataset starts would inherit.
    signal.signal(signal.SIGTERM, _hold_back)
    signal.siginterrupt(signal.SIGTERM, False)  # a library may not know how to go on with a read that broke off
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    watch = functools.partial(_end_after, os.getppid() if parent is None else parent)
    threading.Thread(target=watch, name="fulltilt-parent", daemon=True).start()


def _end_after(parent: int) -> None:
    """torch's workers look after their parent too, but one whose batches nobody takes any more then waits for good."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _hold_back(number: int, frame: FrameType | None) -> None:
    pass


@contextlib.contextmanager
def _hold_sigterm() -> Iterator[None]:
    """Processes that start in the block have SIGTERM blocked, until ``guard_worker``; here it is late by the block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _end_started_on_error() -> Iterator[None]:
    """Processes that were started in the block end where it fails: one of them was killed as it started, and torch
    says so from wherever the main thread is. What SIGTERM does not end, Python waits for at its exit, for good."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:  # whatever it is, a signal's too: raised again when the processes are gone
        started = [child for child in multiprocessing.active_children() if child not in before]
        while any(child.exitcode is None for child in started):
            with contextlib.suppress(RuntimeError):  # torch's word for each of them that ends
                for child in started:
                    child.kill()
                    child.join(LOCK_S)
        raise


def _kill(iterator_id: int, process: Any) -> None:
    """Off torch's list first: it calls it an error when a worker on it is killed."""
    with contextlib.suppress(ValueError):  # not on it any more
        signal_handling._remove_worker_pids(iterator_id)
    process.kill()
