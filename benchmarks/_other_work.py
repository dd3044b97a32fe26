"""Other work on every core: a process each that is busy and idle in turn, for random times."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

from benchmarks._runner import ROOT

SPELL_S = (0.2, 2.0)  # of being busy, and of being idle


@contextlib.contextmanager
def disturb_cores(seed: int) -> Iterator[None]:
    """Keep every core that this process may use busy half of the time, until the block ends."""
    cores = sorted(os.sched_getaffinity(0))
    command = [sys.executable, "-m", __name__]
    others = [subprocess.Popen([*command, str(core), f"{seed}-{core}"], cwd=ROOT) for core in cores]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def work_by_spells(core: int, seed: str) -> None:
    """Be busy and idle on one core until the parent is gone."""
    rng, parent = random.Random(seed), os.getppid()
    os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        end_s = time.monotonic() + rng.uniform(*SPELL_S)
        while time.monotonic() < end_s:
            pass
        time.sleep(rng.uniform(*SPELL_S))


if __name__ == "__main__":
    work_by_spells(int(sys.argv[1]), sys.argv[2])
