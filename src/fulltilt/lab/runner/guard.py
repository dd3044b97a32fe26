"""Keep an attempt from outliving its lease: ``python -m fulltilt.lab.runner.guard`` is what an executor starts.

The guard starts the runner and watches one number in shared memory: the time until which the attempt may live. The
runner moves it with every renewal that the server has confirmed. A runner that hangs, is stopped, or is gone moves
nothing, and the guard ends it with all it started. Where the guard itself is killed, the kernel ends the others.
"""

import ctypes
import json
import mmap
import os
import signal
import sys
import time
from types import FrameType

from fulltilt.hardware.proctree import become_subreaper, kill_descendants, remove_shared_segments, set_death_signal
from fulltilt.lab.runner.order import MARK, Order, take_order

TURN_S = 0.2
START_S = 120.0  # for the first answer of the server
FENCED = 75  # exit code: the attempt is not ours any more


def read_clock_s() -> float:
    """Return seconds that go on while the machine is suspended, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Deadline:
    """The time until which an attempt may live, in memory that guard and runner share."""

    def __init__(self, at_s: float):
        # One aligned word: the other process reads the old value or the new one.
        self._word = ctypes.c_double.from_buffer(mmap.mmap(-1, 8))
        self.move(at_s)

    def move(self, at_s: float) -> None:
        self._word.value = at_s

    def read(self) -> float:
        return self._word.value


def main() -> int:
    """Run the attempt that the environment names, and return how its runner ended."""
    order = take_order(os.environ)
    os.environ[MARK] = order.mark
    become_subreaper()
    deadline = Deadline(read_clock_s() + START_S)
    guard = os.getpid()
    runner = os.fork()
    if runner == 0:
        set_death_signal(signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os._exit(_run(order, deadline, guard))
    return watch(runner, deadline)


def watch(runner: int, deadline: Deadline) -> int:
    """Wait for the runner, hand on signals to it, and end everything once the deadline has passed."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        os.kill(runner, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, hand_on)
    code = None
    while code is None:
        if read_clock_s() > deadline.read():
            os.kill(runner, signal.SIGKILL)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == runner:
            code = os.waitstatus_to_exitcode(status)
        elif not pid:
            time.sleep(TURN_S)
    remove_shared_segments(set(kill_descendants(os.getpid())))
    return code if code >= 0 else 128 - code


def _run(order: Order, deadline: Deadline, guard: int) -> int:
    try:
        from fulltilt.lab.runner.attempt import run_attempt

        return run_attempt(order, deadline, guard)
    except BaseException as error:
        print(json.dumps({"runner": f"{type(error).__name__}: {error}"}), file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
