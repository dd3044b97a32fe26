"""Measure plans in groups: a process of each lives at the same time, and they take turns.

Who waits for its turn is stopped, data workers too, so that it neither takes a core nor works ahead.
"""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from fulltilt.levers import list_environment
from fulltilt.levers.wait_policy import VARIABLES
from fulltilt.records import Evidence, TrialRequest, classify_outcome, decode
from fulltilt.stats import Block, Turns, run_group
from fulltilt.stats.alternation import STALLED_PCT
from fulltilt.tuner.trials.client import Zygote, ZygoteDiedError
from fulltilt.tuner.trials.kinds import END, TAKE_BLOCK
from fulltilt.tuner.trials.process import Watch, run_trial_process

Name = TypeVar("Name", bound=Hashable)
END_PATIENCE_S = 10.0  # for a process that waits for an order, to end of itself


class ArmFailedError(Exception):
    """Says which arm ended before its turn was over, and what was seen of it."""

    def __init__(self, name: Hashable, evidence: Evidence, log_path: Path):
        status, reason = classify_outcome(evidence)
        self.name, self.evidence, self.log_path = name, evidence, log_path
        self.status = "error" if status == "ok" else status
        self.reason = f"{(reason or 'it ended before its turn').strip().splitlines()[0]} (log: {log_path})"
        super().__init__(f"{name}: {self.reason}")


@dataclasses.dataclass
class GroupRunner:
    """Runs groups of plans, each in a fresh process forked from one server.

    Where they cannot live at the same time (several ranks, no memory for all), whole processes run one after the other
    in random order.
    """

    find_zygote: Callable[[Mapping[str, str]], Zygote]  # environment → the server that has it
    folder: Path  # where the logs go
    takes_turns: bool = True
    waits_passively: bool = False  # threads sleep while they wait: with other work on the cores, steps stall otherwise

    def __call__(self, requests: Mapping[Name, TrialRequest]) -> dict[Name, Turns]:
        """Measure a group.

        Raises:
            ArmFailedError: a plan failed. TrainingError: no process can be started.
        """
        if any(request.rank_devices for request in requests.values()):
            self.takes_turns = False
        while self.takes_turns:
            try:
                turns = self._take_turns(requests)
            except ArmFailedError as error:
                if error.status != "out_of_memory" or len(requests) == 1:
                    raise
                self.takes_turns = False
                break
            on_cpu = all(request.device == "cpu" for request in requests.values())
            if self.waits_passively or not on_cpu or min(found.stalled_pct for found in turns.values()) < STALLED_PCT:
                return turns
            self.waits_passively = True  # also the fastest of them is held up: nothing can be told that way
        try:
            return {name: self._run_whole(name, requests[name]) for name in random.sample([*requests], len(requests))}
        except ArmFailedError as error:
            has_ranks = any(request.rank_devices for request in requests.values())
            self.takes_turns = error.status == "out_of_memory" and not has_ranks  # others may fit beside each other
            raise

    def _take_turns(self, requests: Mapping[Name, TrialRequest]) -> dict[Name, Turns]:
        for is_last in (False, True):
            try:
                with open_arms(self._find_zygote, requests, self.folder) as arms:
                    return run_group(arms)
            except ZygoteDiedError:  # with all arms; a new one is tried once
                if is_last:
                    raise
        raise AssertionError("unreachable")

    def _run_whole(self, name: Hashable, request: TrialRequest) -> Turns:
        log_path = name_log(self.folder, request)
        outcome = run_trial_process(request, zygote=self._find_zygote(request), log_path=log_path)
        rate = outcome.measurement and outcome.measurement.samples_per_s
        if not rate or classify_outcome(outcome.evidence)[0] != "ok":
            raise ArmFailedError(name, outcome.evidence, log_path)
        return Turns(samples_per_s=rate, stalled_pct=0.0)

    def _find_zygote(self, request: TrialRequest) -> Zygote:
        usual = VARIABLES["passive"] if self.waits_passively else {}
        return self.find_zygote({**usual, **list_environment(request.plan)})


def name_log(folder: Path, request: TrialRequest) -> Path:
    return folder / "logs" / f"{request.id}.log"


class LiveArm:
    """Controls one process that takes blocks of steps; it is stopped, workers and all, whenever it has no turn."""

    def __init__(self, name: Hashable, request: TrialRequest, zygote: Zygote, log_path: Path):
        self._name, self._log_path = name, log_path
        self._watch = Watch(request, zygote, log_path)
        self._n_blocks = 0
        self._is_waiting = False  # for an order

    def start(self) -> None:
        """Start the process and wait until it is warm.

        Raises:
            ArmFailedError: it ended first.
        """
        self._watch.fork()
        self._await_blocks(0)

    def run_block(self) -> Block:
        """Let it take a block of steps while all others stand still.

        Raises:
            ArmFailedError: it ended first.
        """
        self._n_blocks += 1
        self._is_waiting = False
        self._signal(signal.SIGCONT)
        self._watch.send(TAKE_BLOCK)
        self._await_blocks(self._n_blocks)
        return decode(Block, self._watch.reply["block"])

    def close(self) -> None:
        """End the process and leave nothing of it behind, without waiting for a block that it is in."""
        watch = self._watch
        with contextlib.closing(watch), contextlib.suppress(ZygoteDiedError):  # all that lived has ended with it
            if watch.pid is not None and watch.is_alive:
                self._signal(signal.SIGCONT)
                if self._is_waiting:
                    watch.send(END)
                    end_s = time.monotonic() + END_PATIENCE_S
                    while watch.is_alive and time.monotonic() < end_s:
                        watch.wait()
                if watch.is_alive:
                    watch.kill()

    def _await_blocks(self, n_blocks: int) -> None:
        """Wait until so many blocks were answered, then stop the process."""
        watch, is_over = self._watch, False
        try:
            while watch.reply.get("blocks") != n_blocks and watch.is_alive:
                watch.wait()
            is_over = not watch.is_alive
        except ZygoteDiedError:
            if not watch.is_condemned:  # otherwise it was to be ended anyhow, and the reason stands
                raise
            is_over = True
        if is_over:
            raise ArmFailedError(self._name, watch.collect_evidence(), self._log_path)
        self._signal(signal.SIGSTOP)
        self._is_waiting = True

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and its workers, which are one process group."""
        assert self._watch.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._watch.pid, number)


@contextlib.contextmanager
def open_arms(
    find_zygote: Callable[[TrialRequest], Zygote], requests: Mapping[Name, TrialRequest], folder: Path
) -> Iterator[dict[Name, LiveArm]]:
    """Start an arm for each request, one after the other: two that warm up at once take ten times as long.

    Raises:
        ArmFailedError: one ended; the others are ended with it.
        ZygoteDiedError: the process that they start from died.
    """
    with contextlib.ExitStack() as stack:
        arms: dict[Name, LiveArm] = {}
        for name, request in requests.items():
            zygote = find_zygote(request)
            zygote.start()
            arm = LiveArm(name, dataclasses.replace(request, kind="turns"), zygote, name_log(folder, request))
            stack.callback(arm.close)
            arm.start()
            arms[name] = arm
        yield arms
