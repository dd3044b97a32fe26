"""One search by one peer, in a process of its own under a memory limit: the batch that fails, fails in the allocator.

The child is ``python -m benchmarks._peers_process`` with the search as JSON. It prints what it has so far whenever an
attempt begins, for a library that is refused memory can end the process; the last line of its output is the answer.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time

import torch

from benchmarks._peers_finders import FINDERS
from benchmarks._peers_job import Attempt, Job, limit_memory
from benchmarks._peers_workloads import CASES
from benchmarks._runner import ROOT, silence_peers
from fulltilt.records import decode, encode

DEADLINE_S = 900.0
CLEAN_HEAP = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""What is freed goes back to the system at once. Otherwise glibc keeps it mapped, it counts against the limit, and
after the first failure a retry fails for a batch that would fit: timm's decay was seen to end at batch size 2."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What a child is asked to do."""

    finder: str  # of FINDERS
    case: str  # of CASES
    device: str
    n_steps: int  # a trial
    smallest: int  # run once before the limit is set
    largest: int  # where those start that only search downwards
    room_mib: int  # what may be used from there on


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search came to. ``recommended`` is None when it ended with an error, which ``failure`` tells.

    ``seconds`` are of the finder's own call; starting Python, importing the peer and a first step are left out. Where
    the process died they end where its last attempt began.
    """

    recommended: int | None
    seconds: float
    tried: tuple[Attempt, ...] = ()
    failure: str | None = None

    @property
    def n_out_of_memory(self) -> int:
        return sum(attempt.status == "out_of_memory" for attempt in self.tried)

    @property
    def has_run_its_own(self) -> bool:
        """Whether a step with as many samples as are recommended was run to its end."""
        return any(a.status == "ok" and a.largest_step == self.recommended for a in self.tried)


def run_search(search: Search, *, deadline_s: float = DEADLINE_S) -> Found:
    """Run the finder in a new process and read its answer; a process that dies becomes a failure that says so."""
    command = [sys.executable, "-m", __name__, json.dumps(encode(search))]
    environment = {**os.environ, **CLEAN_HEAP, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            said, errors = child.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            said, _ = child.communicate()
            return read_unfinished(said, f"no answer after {deadline_s:g} s")
    if child.returncode:
        return read_unfinished(said, describe_death(child.returncode, errors))
    return decode(Found, json.loads(said.splitlines()[-1]))


def read_unfinished(said: str, failure: str) -> Found:
    """Read what a process that came to no answer had tried; the attempt it was in failed with it."""
    lines = said.splitlines()
    if not lines:
        return Found(recommended=None, seconds=0.0, failure=failure)
    found = decode(Found, json.loads(lines[-1]))
    found.tried[-1].said = failure
    return dataclasses.replace(found, failure=failure)


def describe_death(code: int, errors: str) -> str:
    """Name the signal that ended a process, else quote the last line that it wrote."""
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with {code}: {(errors.strip().splitlines() or ['no word'])[-1]}"


def main(search: Search) -> None:
    finder = FINDERS[search.finder]
    torch.set_num_threads(1)
    job = Job(CASES[search.case].workload, device=search.device, n_steps=search.n_steps)
    if finder.loads is not None:  # a library is not part of the batch
        importlib.import_module(finder.loads)
    recommended, failure = None, None
    with silence_peers():
        job.run_steps(search.smallest)
        job.attempts.clear()
        limit_memory(job.device, search.room_mib * 2**20)
        started = time.perf_counter()
        job.on_attempt = lambda job: tell(job, time.perf_counter() - started)
        try:
            recommended = finder.find(job, search.largest)
        except Exception as error:  # process boundary: what a finder does not survive is a finding
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = time.perf_counter() - started
    tell(job, seconds, recommended, failure)


def tell(job: Job, seconds: float, recommended: int | None = None, failure: str | None = None) -> None:
    """Print what the search came to so far."""
    found = Found(recommended=recommended, seconds=seconds, tried=tuple(job.attempts), failure=failure)
    print(json.dumps(encode(found)), flush=True)


if __name__ == "__main__":
    main(decode(Search, json.loads(sys.argv[1])))
