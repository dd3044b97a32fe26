"""Build, measure and load candidates in processes of their own; every answer goes into the journal."""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import DeviceMemoryError, FulltiltError, StorageError, UsageError
from fulltilt.hardware import read_pressure
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.process import PRELOAD, Request, run_measuring
from fulltilt.infer.search.accept import accept
from fulltilt.infer.search.journal import Journal, OverError
from fulltilt.infer.search.policies import Goal
from fulltilt.infer.search.result import Candidate, Live, Status
from fulltilt.levers import Facts
from fulltilt.records import Plan, WorkloadSource, decode, encode
from fulltilt.stats import Turns, run_group
from fulltilt.tuner.trials.client import Zygote
from fulltilt.tuner.trials.live import ArmFailedError, LiveArm, open_arms

BUILDING, ARM = "fulltilt.infer.building:run", "fulltilt.infer.search.arm:run"
BUILD_LIMIT_S = 600.0
LEAST_FREE_BYTES = 1 << 20
OPEN_LIMIT_S = 300.0  # also of a block; what compiles anew takes half a minute
KINDS: dict[type[FulltiltError], Status] = {
    DeviceMemoryError: "out_of_memory",
    UsageError: "refused",  # the model has nothing that the plan could change
}
Order = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What came of building a candidate; the last two are None where there is no artefact."""

    status: Status | None = None
    reason: str | None = None
    seconds: float
    manifest: Manifest | None = None
    facts: Facts | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What processes that lived at the same time measured, one stage after the other.

    Attributes:
        stages: Arm → figures, for each stage.
        arms: Arm → seconds to its first answer, the most memory it held, and the lengths of its samples.
        open_s: Until all had opened their artefacts, of ``seconds``.
        cpu_pressure_pct: Of the time, that in which a task on the machine waited for a core.
        failed: Arm, status and reason, where one ended: then there is nothing else.
    """

    stages: tuple[dict[str, Turns], ...] = ()
    arms: dict[str, Any] = dataclasses.field(default_factory=dict)
    open_s: float = 0.0
    seconds: float = 0.0
    cpu_pressure_pct: float | None = None
    failed: tuple[str, str, str] | None = None


@dataclasses.dataclass
class ProcessBench:
    """Builds and measures on this machine. Where the time is over first, its methods raise OverError.

    Args:
        request: What every process that builds is told: configuration, weights, device.
        tell: Told what is done.
    """

    folder: Path
    request: Mapping[str, Any]
    journal: Journal
    tell: Callable[[str], None] = lambda _: None

    @property
    def spent_s(self) -> float:
        return self.journal.spent_s

    def find_artefact(self, name: str) -> Path:
        return self.folder / "artefacts" / slug(name)

    def build(self, name: str, plan: Plan, **time_s: float) -> Built:
        """Build an artefact; whatever happens in that process is an answer.

        Raises:
            StorageError: no space is left.
        """
        self.tell(f"building {name}")
        question = f"build {name}: {plan.key}"
        find = lambda limit_s: encode(self._build(name, plan, limit_s))  # noqa: E731
        return decode(Built, self.journal.ask(question, find, **time_s))

    def _build(self, name: str, plan: Plan, limit_s: float) -> Built:
        folder, begin_s = self.find_artefact(name), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)  # of a search that was killed while it built
        try:
            measured = run_measuring(
                {**self.request, "plan": plan.to_json(), "folder": str(folder)},
                log_path=self.folder / "logs" / f"build-{slug(name)}.log",
                on_progress=lambda done, total: None,
                body=BUILDING,
                deadline_s=min(BUILD_LIMIT_S, limit_s) if limit_s < math.inf else limit_s,  # eager takes what it takes
            )
        except StorageError:
            raise
        except FulltiltError as error:
            seconds = time.monotonic() - begin_s
            if seconds >= limit_s:
                raise OverError from None
            if shutil.disk_usage(self.folder).free < LEAST_FREE_BYTES:  # which libraries tell in words of their own
                raise StorageError(f"{self.folder} has no space left ({error}); make room and run it again") from None
            return Built(status=KINDS.get(type(error), "failed"), reason=str(error), seconds=seconds)
        reason = "; ".join(measured.pop("failures")) or None
        told = {"status": "refused" if reason else None, "reason": reason, "seconds": time.monotonic() - begin_s}
        return decode(Built, measured | told)

    def measure(self, question: str, stages: Sequence[Mapping[str, Order]], seconds: float, **time_s: float) -> Group:
        """Have candidates take turns.

        Args:
            question: Names the group: the same one has the same answer.
            stages: What the blocks of each are of, one after the other.
            seconds: Of timed blocks, for each pair and stage.
        """
        arms = [*stages[0]]
        self.tell(f"measuring {', '.join(arms)}" if len(arms) < 3 else f"measuring {len(arms)} in turns")
        find = lambda limit_s: encode(self._measure(stages, seconds, limit_s))  # noqa: E731
        return decode(Group, self.journal.ask(f"{question}: {stages}", find, **time_s))

    def _measure(self, stages: Sequence[Mapping[str, Order]], seconds: float, limit_s: float) -> Group:
        folders = {name: self.find_artefact(name) for name in stages[0]}
        begin_s, before_us = time.monotonic(), read_pressure().some_total_us
        turns = []
        try:
            with open_artefacts(folders, self.folder, limit_s=limit_s) as live:
                open_s = time.monotonic() - begin_s
                for stage in stages:
                    for arm, order in stage.items():
                        live[arm].order = json.dumps(order)
                    turns.append(run_group({arm: live[arm] for arm in stage}, seconds=seconds))
                arms = {name: arm.reply for name, arm in live.items()}
        except ArmFailedError as error:
            if time.monotonic() - begin_s >= limit_s:
                raise OverError from None
            return Group(failed=(str(error.name), error.status, error.reason))
        seconds, after_us = time.monotonic() - begin_s, read_pressure().some_total_us
        waited_us = None if after_us is None or before_us is None else after_us - before_us
        return Group(
            stages=tuple(turns),
            arms=arms,
            open_s=open_s,
            seconds=seconds,
            cpu_pressure_pct=None if waited_us is None else waited_us / seconds / 1e4,
        )

    def accept(self, row: Candidate, goal: Goal, **time_s: float) -> Live:
        """Serve a candidate with its policy, and load it."""
        self.tell(f"{row.name} under load")
        folder, logs = self.find_artefact(row.name), self.folder / "logs"
        find = lambda limit_s: encode(accept(row, folder, goal, logs, limit_s))  # noqa: E731
        return decode(Live, self.journal.ask(f"accept {row.name} {row.policy} {goal}", find, **time_s))


@contextlib.contextmanager
def open_artefacts(
    folders: Mapping[str, Path], out_dir: Path, *, limit_s: float = math.inf
) -> Iterator[dict[str, LiveArm]]:
    """Open each artefact in a process of its own, which stands still until it is told to take a block.

    Args:
        out_dir: Logs go into its folder ``logs``.
        limit_s: When they are ended, whatever they do.

    Raises:
        ArmFailedError: one ended; the others are ended with it.
    """
    end_s = time.monotonic() + limit_s
    source = WorkloadSource(config={}, base_dir="", import_paths=(os.getcwd(),))
    common = Request(source=source, device="", deadline_s=OPEN_LIMIT_S, patience_s=OPEN_LIMIT_S, given={})
    requests = {
        arm: dataclasses.replace(common, id=f"arm-{slug(arm)}", given={"folder": str(folder)})
        for arm, folder in folders.items()
    }
    with (
        Zygote(out_dir / "logs" / "arms.log", body=ARM, preload=PRELOAD) as zygote,
        open_arms(lambda request: zygote, requests, out_dir, end_s) as arms,
    ):
        yield arms


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
