"""Trials over ranks as they really are, or with something run in the ranks that goes wrong, without torch."""

import os
import signal
import time
from pathlib import Path

from fulltilt.engine.ranks.process import find_link

N_BYTES = 400 * 2**20


def run_request(message, answer):
    """The body of the trial's process."""
    from fulltilt.tuner.trials import kinds

    act = PLANTED.get(message["source"]["config"].get("act"))
    if act is not None:
        kinds.measure_as_rank = act  # this process runs one trial only
    kinds.run_request(message, answer)


def wait_forever():
    """As in a collective that another rank never comes to."""
    while True:
        time.sleep(0.05)


def run_out_of_memory(message):
    if find_link().rank == 1:
        Path(message["source"]["config"]["fault_s"]).write_text(str(time.monotonic()))
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    wait_forever()


def fill_memory(message):
    held = b"x" * (N_BYTES if find_link().rank == 1 else 1)  # every page of it is written
    wait_forever()
    del held


def die(message):
    if find_link().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_forever()


def hang(message):
    """Rank 1 stands still after three steps, when rank 0 is a step further already."""
    link, is_ahead = find_link(), Path(os.environ["TMPDIR"]) / "ahead"
    while link.rank == 1 and not is_ahead.exists():
        time.sleep(0.01)
    for _ in range(3 if link.rank == 1 else 4):
        for phase in ("data_wait", "forward", "backward", "optimizer"):
            link.lap(phase)
    is_ahead.touch()
    wait_forever()


PLANTED = {f.__name__: f for f in (run_out_of_memory, fill_memory, die, hang)}
