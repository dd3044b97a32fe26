"""Measure plans in groups: a process of each lives at the same time, and they take turns.

Who waits for its turn is stopped, data workers too, so that it neither takes a core nor works ahead.
"""

import contextlib
import dataclasses
import math
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fulltilt.hardware import read_memory_bytes, read_memory_room_bytes
from fulltilt.levers import list_environment
from fulltilt.levers.thread_affinity import NAME as PINNED
from fulltilt.levers.wait_policy import VARIABLES
from fulltilt.records import Evidence, Plan, Trial, TrialRequest, classify_outcome, decode
from fulltilt.stats import Block, Turns, run_group
from fulltilt.stats.alternation import STALLED_PCT
from fulltilt.tuner.question.options import CPU_LIMIT_SHARE
from fulltilt.tuner.trials.client import Zygote, ZygoteDiedError
from fulltilt.tuner.trials.kinds import END, TAKE_BLOCK
from fulltilt.tuner.trials.process import Watch, run_trial_process
from fulltilt.tuner.trials.rows import judge

Name = TypeVar("Name", bound=Hashable)
N_ROUNDS = 4  # of a group at most, where they do not agree
END_PATIENCE_S = 10.0  # for a process that waits for an order, to end of itself
MIN_ANSWER_S = 0.1  # a deadline that has passed already is still one
OUT_OF_TIME = "the time for all plans was over before it had answered; give a larger --budget"


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
    takes_turns: bool = True  # whether the processes of the last group lived at the same time
    waits_passively: bool = False  # threads sleep while they wait: with other work on the cores, steps stall otherwise
    n_fit: float = math.inf  # processes that have room beside each other, as far as was seen
    stalled_pct: dict[Plan, list[float]] = dataclasses.field(default_factory=dict)  # group by group, as usual

    def recall(self, rows: Sequence[Trial]) -> None:
        """Go on as in the groups that these rows are of."""
        ways = [row.turns for row in rows if row.turns not in (None, "whole")]
        self.waits_passively = bool(ways) and ways[-1] != "usual"
        self.stalled_pct = {}
        for row in rows:
            if row.turns == "usual" and row.stalled_pct is not None:
                self._note_stalls(row.plan, row.stalled_pct)
        self.n_fit = min(Counter(row.group for row in rows if row.turns == "whole").values(), default=math.inf) - 1

    def __call__(self, requests: Mapping[Name, TrialRequest], *, end_s: float = math.inf) -> dict[Name, Turns]:
        """Measure a group.

        Args:
            end_s: When its processes are ended, whatever they do, by ``time.monotonic``.

        Raises:
            ArmFailedError: a plan failed. TrainingError: no process can be started.
        """
        has_ranks = any(request.rank_devices for request in requests.values())
        self.takes_turns = len(requests) <= self.n_fit and not has_ranks
        try:
            if self.takes_turns:
                return self._take_turns(requests, end_s)
        except ArmFailedError as error:
            if error.status != "out_of_memory" or len(requests) == 1:
                raise
            self.takes_turns = False
        order = random.sample([*requests], len(requests))
        turns = {name: self._run_whole(name, requests[name], end_s) for name in order}
        self.n_fit = min(self.n_fit, len(requests) - 1)  # not where one failed: the others may fit beside each other
        return turns

    def _take_turns(
        self, asked: Mapping[Name, TrialRequest], end_s: float, *, is_last: bool = False
    ) -> dict[Name, Turns]:
        requests, way = asked, "usual"
        if self.waits_passively:
            requests = pin_threads(asked)
            way = "passive" if requests == asked else "pinned"
        try:
            with open_arms(self._find_zygote, share_memory(requests), self.folder, end_s) as arms:
                turns = run_group(arms, n_rounds=N_ROUNDS)
        except ArmFailedError as error:
            if is_last or error.status != "error" or error.evidence.exit_code is not None:
                raise  # else the server is gone, and nobody saw how the process ended: a new one is tried once
            return self._take_turns(asked, end_s, is_last=True)
        if not self.waits_passively:
            for name, request in requests.items():
                if request.device == "cpu":
                    self._note_stalls(request.plan, turns[name].stalled_pct)
            usual_pct = min(map(statistics.fmean, self.stalled_pct.values()), default=0.0)
            if usual_pct >= STALLED_PCT:  # also the plan that stalls least is held up: nothing can be told that way
                self.waits_passively = True
                return self._take_turns(asked, end_s)
        return {name: dataclasses.replace(each, way=way) for name, each in turns.items()}

    def _note_stalls(self, plan: Plan, stalled_pct: float) -> None:
        """Note how much of a group a plan on a CPU stalled, if it can tell: with workers steps come in bursts."""
        if not plan["num_workers"]:
            self.stalled_pct.setdefault(plan, []).append(stalled_pct)

    def _run_whole(self, name: Hashable, request: TrialRequest, end_s: float) -> Turns:
        log_path, zygote = name_log(self.folder, request), self._find_zygote(request)
        left_s = max(MIN_ANSWER_S, end_s - time.monotonic())
        request = dataclasses.replace(request, deadline_s=min(request.deadline_s, left_s))
        outcome = run_trial_process(request, zygote=zygote, log_path=log_path)
        measured, evidence = outcome.measurement, outcome.evidence
        if classify_outcome(evidence)[0] == "ok":
            status, reason = judge(measured, request.kind, request.memory_limit_bytes)
            if status == "ok" and measured is not None and measured.samples_per_s is not None:
                return Turns(samples_per_s=measured.samples_per_s, stalled_pct=0.0, way="whole")
            is_memory = status == "out_of_memory"
            evidence = Evidence(memory_watchdog=reason) if is_memory else Evidence(message=reason or "")
        raise ArmFailedError(name, evidence, log_path)

    def _find_zygote(self, request: TrialRequest) -> Zygote:
        usual = VARIABLES["passive"] if self.waits_passively else {}
        return self.find_zygote({**usual, **list_environment(request.plan)})


def pin_threads(requests: Mapping[Name, TrialRequest]) -> Mapping[Name, TrialRequest]:
    """Have each thread stay on a core of its own in plans that can, unless that is what tells them apart."""
    if any(request.plan[PINNED] for request in requests.values()):
        return requests
    return {
        name: dataclasses.replace(request, plan=request.plan.replace(**{PINNED: True}), settles=True)
        if request.device == "cpu"
        else request
        for name, request in requests.items()
    }


def share_memory(requests: Mapping[Name, TrialRequest]) -> dict[Name, TrialRequest]:
    """Limit each on a CPU to its part of what is free now, where that is less than a whole run may use."""
    room_bytes = [room for room in (read_memory_bytes()[1], read_memory_room_bytes()) if room is not None]
    share_bytes = int(CPU_LIMIT_SHARE * min(room_bytes) / len(requests))
    return {
        name: dataclasses.replace(request, memory_limit_bytes=min(request.memory_limit_bytes, share_bytes))
        if request.memory_limit_bytes is not None and request.device == "cpu"
        else request
        for name, request in requests.items()
    }


def name_log(folder: Path, request: TrialRequest) -> Path:
    return folder / "logs" / f"{request.id}.log"


class LiveArm:
    """Controls one process that takes blocks of steps; it is stopped, workers and all, whenever it has no turn.

    Attributes:
        order: What it is told for its next block.
    """

    def __init__(self, name: Hashable, request: TrialRequest, zygote: Zygote, log_path: Path, end_s: float = math.inf):
        self._name, self._log_path, self._end_s = name, log_path, end_s
        self.order = TAKE_BLOCK
        self._watch = Watch(request, zygote, log_path)
        self._n_blocks = 0
        self._is_waiting = False  # for an order

    def start(self) -> None:
        """Start the process and wait until it is warm.

        Raises:
            ArmFailedError: it ended first.
        """
        self._await_blocks(0)

    def run_block(self) -> Block:
        """Let it take a block of steps while all others stand still.

        Raises:
            ArmFailedError: it ended first.
        """
        self._n_blocks += 1
        self._is_waiting = False
        self._signal(signal.SIGCONT)
        self._watch.send(self.order)
        self._await_blocks(self._n_blocks)
        return decode(Block, self._watch.reply["block"])

    @property
    def reply(self) -> Mapping[str, Any]:
        """What it has answered, the latest of each kind."""
        return self._watch.reply

    def tell_end(self) -> None:
        """Have the process go on, and end where it waits for an order; ``close`` waits for that."""
        self._signal(signal.SIGCONT)
        if self._is_waiting:
            self._watch.send(END)

    def close(self) -> None:
        """End the process and leave nothing of it behind, without waiting for a block that it is in."""
        watch = self._watch
        with contextlib.closing(watch), contextlib.suppress(ZygoteDiedError):  # all that lived has ended with it
            if watch.pid is not None and watch.is_alive:
                self.tell_end()
                end_s = time.monotonic() + END_PATIENCE_S * self._is_waiting
                while watch.is_alive and time.monotonic() < end_s:
                    watch.wait()
                if watch.is_alive:
                    watch.kill()

    def _await_blocks(self, n_blocks: int) -> None:
        """Wait until so many blocks were answered by the process, which starts with none, then stop it."""
        watch, evidence, is_late = self._watch, None, False
        try:
            if watch.pid is None:
                watch.fork()
            while watch.reply.get("blocks") != n_blocks and watch.is_alive:
                if time.monotonic() > self._end_s:
                    is_late = not watch.is_condemned  # else the reason stands
                    watch.kill()
                else:
                    watch.wait()
            is_over = not watch.is_alive
        except ZygoteDiedError as error:
            is_over = True
            if not watch.is_condemned:  # otherwise it was to be ended anyhow, and the reason stands
                evidence = Evidence(message=f"{error}, twice")
        if is_over:
            evidence = evidence or watch.collect_evidence()
            evidence = dataclasses.replace(evidence, deadline=OUT_OF_TIME) if is_late else evidence
            raise ArmFailedError(self._name, evidence, self._log_path)
        self._signal(signal.SIGSTOP)
        self._is_waiting = True

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process and its workers, which are one process group."""
        assert self._watch.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._watch.pid, number)


@contextlib.contextmanager
def open_arms(
    find_zygote: Callable[[TrialRequest], Zygote],
    requests: Mapping[Name, TrialRequest],
    folder: Path,
    end_s: float = math.inf,
) -> Iterator[dict[Name, LiveArm]]:
    """Start an arm for each request, one by one in random order: two that warm up at once take ten times as long.

    Args:
        end_s: When all are ended, whatever they do, by ``time.monotonic``.

    Raises:
        ArmFailedError: one ended, or the process that they start from died; the others are ended with it.
    """
    with contextlib.ExitStack() as stack:
        arms: dict[Name, LiveArm] = {}
        for name, request in random.sample([*requests.items()], len(requests)):
            zygote = find_zygote(request)
            zygote.start()
            arm = LiveArm(name, dataclasses.replace(request, kind="turns"), zygote, name_log(folder, request), end_s)
            stack.callback(arm.close)
            arm.start()
            arms[name] = arm
        yield {name: arms[name] for name in requests}
        for arm in arms.values():  # all at once, before one after the other is waited for
            arm.tell_end()
