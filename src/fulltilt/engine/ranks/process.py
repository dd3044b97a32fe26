"""Inside a rank: a process that ``ranks.run_ranks`` started. No torch here, what runs brings its own.

Three descriptors come from the parent. The *request*, a file, says what to run. Over the *link*, a connection, travel
events and the result, and back the wish to stop; when it ends, the parent is gone, and so is this process with its data
workers. In the *marks*, memory shared with the parent, a rank notes how far it is, several times a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import importlib
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from fulltilt.errors import FulltiltError
from fulltilt.records import Event, StepsDone

PHASES = ("start", "data_wait", "h2d", "forward", "backward", "optimizer", "evaluation")
N_CELLS = 5
COUNT, PHASE, STEP, IS_ALONE, IS_WAITING = range(N_CELLS)
CODES = {phase: code for code, phase in enumerate(PHASES)}

_links: list[Link] = []


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What went wrong in a rank, as far as it could tell itself.

    Attributes:
        error: The exception, where it is one of fulltilt's and can travel.
        where: File, line and function that raised it.
    """

    type_name: str
    message: str
    where: str
    trace: str
    error: FulltiltError | None = None


class Marks:
    """How far each rank is: for every rank a count that only grows, the phase it finished last, its optimizer steps,
    whether the others have to wait for it, and whether it waits for them."""

    def __init__(self, descriptor: int, n_ranks: int):
        self._memory = mmap.mmap(descriptor, n_ranks * N_CELLS * 8)
        self.cells = memoryview(self._memory).cast("q")

    def read(self, rank: int) -> list[int]:
        return self.cells[rank * N_CELLS : (rank + 1) * N_CELLS].tolist()


class Link:
    """The rank's end of the connection to the process that started it.

    Attributes:
        is_stop_wanted: The parent asked to stop.
    """

    def __init__(self, connection: Connection, marks: Marks, rank: int):
        self.rank = rank
        self.is_stop_wanted = False
        self._connection, self._cells, self._base = connection, marks.cells, rank * N_CELLS
        self._taken = threading.Semaphore(0)
        self._lock = threading.Lock()

    def lap(self, phase: str) -> None:
        """Note that a phase of the step, a batch of an evaluation or a part of the start is done. Stands where a timer
        does."""
        cells, base = self._cells, self._base
        cells[base + COUNT] += 1
        cells[base + PHASE] = CODES.get(phase, 0)
        if phase == "optimizer":
            cells[base + STEP] += 1

    def set_step(self, step: int) -> None:
        """Where the run goes on from: optimizer steps done before."""
        self._cells[self._base + STEP] = step

    def work_alone(self) -> contextlib.AbstractContextManager[None]:
        """The others wait for this rank, for as long as it takes: it writes a checkpoint, for instance."""
        return self._mark(IS_ALONE)

    def wait_for_others(self) -> contextlib.AbstractContextManager[None]:
        """This rank stands still until the others say something: one that does not, and does not wait itself, hangs."""
        return self._mark(IS_WAITING)

    @contextlib.contextmanager
    def _mark(self, cell: int) -> Iterator[None]:
        before = self._cells[self._base + cell]
        self._cells[self._base + cell] = 1
        try:
            yield
        finally:
            self._cells[self._base + cell] = before

    def send_event(self, event: Event) -> None:
        """Hand an event to the parent's listeners. Waits until they took it, but for logging intervals: what a
        checkpoint counts on is stored before it is written."""
        self.send("event", event)
        if not isinstance(event, StepsDone):
            self._taken.acquire()

    def send(self, kind: str, value: Any) -> None:
        with self._lock:
            self._connection.send((kind, value))

    def receive_work(self, request: int) -> tuple[Callable[..., Any], dict[str, Any]]:
        """Read the function to run and its arguments; then listen for what else the parent says."""
        with open(f"/proc/self/fd/{request}", "rb") as file:  # noqa: PTH123  (opened anew: ranks share the descriptor)
            import_paths, pickled = pickle.load(file)
        os.close(request)
        sys.path[:0] = [path for path in import_paths if path not in sys.path]
        threading.Thread(target=self._listen, daemon=True, name="link").start()
        return pickle.loads(pickled)

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if message == "stop":
                    self.is_stop_wanted = True
                elif message == "taken":
                    self._taken.release()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the parent is gone; this group is the rank and its data workers


def find_link() -> Link | None:
    """The link of this process; None where nobody watches it (one device, or started by torchrun)."""
    return _links[0] if _links else None


def main() -> None:
    """``python -c '…main()' LINK MARKS REQUEST RANK N_RANKS``: run what the parent sends, tell it how that ended."""
    faulthandler.enable()
    descriptor, marks, request, rank, n_ranks = map(int, sys.argv[1:6])
    link = Link(Connection(descriptor), Marks(marks, n_ranks), rank)
    _links.append(link)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(link, "is_stop_wanted", True))
    try:
        function, given = link.receive_work(request)
        result = function(**given)
        link.send("done", result if rank == 0 else None)
    except BaseException as error:  # process boundary: whatever it is, the parent has to hear of it
        link.send("failed", describe_failure(error))
        _flush()
        os._exit(1)  # joining other ranks' threads or a broken process group could take for ever
    _leave_group()


def describe_failure(error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return Failure(
        type_name=type(error).__name__,
        message=str(error),
        where=where,
        trace="".join(traceback.format_exception(error)),
        error=error if isinstance(error, FulltiltError) and _can_travel(error) else None,
    )


def _can_travel(error: FulltiltError) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # whatever a user's own subclass does when it is pickled
        return False


def _leave_group() -> None:
    if "torch.distributed" in sys.modules:
        distributed = importlib.import_module("torch.distributed")
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
