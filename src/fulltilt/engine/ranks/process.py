"""Inside a rank, a process that ``run_ranks`` started. It loads torch only with what it runs.

Three descriptors come from the parent. The *request*, a file, says what to run. Over the *link*, a connection, travel
events and the result, and back the wish to stop; when it ends, the parent is gone, and this process ends too, with its
data workers. In the *marks*, memory shared with the parent, a rank notes how far it is, several times a step.
"""

import contextlib
import dataclasses
import faulthandler
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from fulltilt.errors import IN_EVALUATION, FulltiltError, find_place
from fulltilt.records import Event, StepsDone

PHASES = ("start", "data_wait", "h2d", "forward", "backward", "optimizer", "evaluation")
CODES = {phase: code for code, phase in enumerate(PHASES)}

_links: list["Link"] = []


class Mark(NamedTuple):
    """How far a rank is."""

    count: int  # of marks; only grows
    phase: int  # the one it ended last, in PHASES
    step: int  # optimizer steps it has taken
    is_alone: int  # the others have to wait for it
    is_waiting: int  # it waits for the others


N_CELLS = len(Mark._fields)
COUNT, PHASE, STEP, IS_ALONE, IS_WAITING = range(N_CELLS)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What went wrong in a rank, as far as it could tell itself."""

    type_name: str
    message: str
    where: str  # file, line and function that raised it
    trace: str
    error: FulltiltError | None = None  # where it is one of fulltilt's and can travel


class Marks:
    """The memory in which every rank keeps its ``Mark``."""

    def __init__(self, descriptor: int, n_ranks: int):
        self.cells = memoryview(mmap.mmap(descriptor, n_ranks * N_CELLS * 8)).cast("q")

    def read(self, rank: int) -> Mark:
        return Mark(*self.cells[rank * N_CELLS : (rank + 1) * N_CELLS])


class Link:
    """The rank's end of the connection to the process that started it."""

    def __init__(self, connection: Connection, marks: Marks, rank: int):
        self.rank = rank
        self.is_stop_wanted = False  # by the parent
        self._connection, self._cells, self._base = connection, marks.cells, rank * N_CELLS
        self._taken = threading.Semaphore(0)
        self._lock = threading.Lock()

    def lap(self, phase: str) -> None:
        """Note that a phase of the step, a batch of an evaluation or a part of the start is done: a ``Timer``."""
        cells, base = self._cells, self._base
        cells[base + COUNT] += 1
        cells[base + PHASE] = CODES.get(phase, 0)
        if phase == "optimizer":
            cells[base + STEP] += 1

    def set_step(self, step: int) -> None:
        """Note how many optimizer steps were taken before the run goes on."""
        self._cells[self._base + STEP] = step

    @contextlib.contextmanager
    def mark(self, cell: int) -> Iterator[None]:
        """Note inside the block that the others wait for this rank (IS_ALONE), or it for them (IS_WAITING)."""
        before = self._cells[self._base + cell]
        self._cells[self._base + cell] = 1
        try:
            yield
        finally:
            self._cells[self._base + cell] = before

    def send_event(self, event: Event) -> None:
        """Hand an event to the parent's listeners, and wait until they took it.

        Logging intervals are not waited for: what a checkpoint counts on is stored before it is written.
        """
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
                if self._connection.recv() == "stop":
                    self.is_stop_wanted = True
                else:
                    self._taken.release()
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the parent is gone; this group is the rank and its data workers


def find_link() -> Link | None:
    """Return the link of this process; None where nobody watches it (one device, or started by torchrun)."""
    return _links[0] if _links else None


def main() -> None:
    """Run what the parent sends and tell it how that ended: ``python -c '…main()' LINK MARKS REQUEST RANK N_RANKS``."""
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
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)  # joining other ranks' threads or a broken process group could take for ever
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def describe_failure(error: BaseException) -> Failure:
    """Describe an exception for the parent."""
    frames = traceback.extract_tb(error.__traceback__)
    phase = f"{IN_EVALUATION}, " if IN_EVALUATION in getattr(error, "__notes__", ()) else ""
    last = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return Failure(
        type_name=type(error).__name__,
        message=str(error),
        where=phase + (find_place(error) or last),
        trace="".join(traceback.format_exception(error)),
        error=error if isinstance(error, FulltiltError) and _can_travel(error) else None,
    )


def _can_travel(error: FulltiltError) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # whatever a user's own subclass does when it is pickled
        return False
