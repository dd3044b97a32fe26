"""Build and measure candidates in processes of their own; every answer goes into the journal."""

import dataclasses
import functools
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.errors import DeviceMemoryError, FulltiltError, StorageError, UsageError
from fulltilt.hardware import read_pressure
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.process import run_measuring
from fulltilt.infer.search.journal import Journal
from fulltilt.infer.search.live import ArmFailedError, ArmSpec, LiveArm, open_arms
from fulltilt.infer.search.result import Status
from fulltilt.records import Plan, decode, encode
from fulltilt.stats import Turns, run_group

BUILDING = "fulltilt.infer.building:run"
BUILD_LIMIT_S = 600.0
N_JITTER = 64  # of the single calls of an order that are kept
Order = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """What came of building a candidate; ``manifest`` is None where there is no artefact."""

    status: Status | None
    reason: str | None
    manifest: Manifest | None
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArmFacts:
    """What was seen of the process of an arm.

    Attributes:
        lengths: Of the artefact's samples.
        calls_s: Seconds of single calls of each stage; empty where a stage has batches of several lengths.
    """

    cold_start_s: float
    memory_gib: float
    lengths: tuple[int, ...]
    calls_s: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """What processes that lived at the same time measured, one stage after the other.

    Attributes:
        stages: Arm → figures, for each stage.
        cpu_pressure_pct: Of the time, that in which a task on the machine waited for a core.
        failed: Arm, status and reason, where one ended: then there are no stages.
    """

    stages: tuple[dict[str, Turns], ...]
    arms: dict[str, ArmFacts]
    seconds: float = 0.0
    cpu_pressure_pct: float | None = None
    failed: tuple[str, Status, str] | None = None


class ProcessBench:
    """Builds and measures on this machine.

    Args:
        request: What every process that builds is told: configuration, weights, device.
    """

    def __init__(
        self,
        folder: Path,
        request: Mapping[str, Any],
        journal: Journal,
        *,
        tell: Callable[[str], None] = lambda _: None,
    ):
        self._folder, self._request, self._journal, self.tell = folder, request, journal, tell
        self._plans: dict[str, Plan] = {}

    @property
    def spent_s(self) -> float:
        return self._journal.spent_s

    def find_artefact(self, name: str) -> Path:
        return self._folder / "artefacts" / slug(name)

    def build(self, name: str, plan: Plan) -> Built:
        """Build an artefact; whatever happens in that process is an answer.

        Raises:
            StorageError: no space is left.
        """
        self._plans[name] = plan
        question = f"build {name}: {plan.key}"
        find = functools.partial(self._build, name, plan)
        built = decode(Built, self._journal.ask(question, find))
        if built.status is None and not (self.find_artefact(name) / "manifest.json").exists():
            self._journal.forget(question)
            built = decode(Built, self._journal.ask(question, find))
        return built

    def _build(self, name: str, plan: Plan) -> Any:
        folder, begin_s = self.find_artefact(name), time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)  # of a search that was killed while it built
        status: Status | None = None
        reason = manifest = None
        try:
            request = {**self._request, "plan": plan.to_json(), "folder": str(folder)}
            measured = run_measuring(
                request,
                log_path=self._folder / "logs" / f"build-{slug(name)}.log",
                on_progress=lambda done, total: None,
                environment=list_environment(plan),
                body=BUILDING,
                deadline_s=BUILD_LIMIT_S,
            )
            reason = "; ".join(measured["failures"]) or None
            status = "refused" if reason else None
            manifest = decode(Manifest, measured["manifest"])
        except StorageError:
            raise
        except DeviceMemoryError as error:
            status, reason = "out_of_memory", str(error)
        except UsageError as error:  # the model has nothing that the plan could change
            status, reason = "refused", str(error)
        except FulltiltError as error:
            status, reason = "failed", str(error)
        seconds = time.monotonic() - begin_s
        return encode(Built(status=status, reason=reason, manifest=manifest, seconds=seconds))

    def measure(
        self, question: str, arms: Mapping[str, str], stages: Sequence[Mapping[str, Order]], seconds: float
    ) -> Group:
        """Have arms take turns.

        Args:
            question: Names the group: the same one has the same answer.
            arms: Arm → candidate, whose artefact it opens.
            stages: What the blocks of each arm are of, one after the other.
            seconds: Of timed blocks, for each pair of arms and stage.
        """
        self.tell(f"measuring {', '.join(arms)}" if len(arms) < 3 else f"measuring {len(arms)} in turns")
        key = f"{question}: {sorted(arms.items())} {[sorted(stage.items()) for stage in stages]}"
        return decode(Group, self._journal.ask(key, lambda: encode(self._measure(arms, stages, seconds))))

    def _measure(self, arms: Mapping[str, str], stages: Sequence[Mapping[str, Order]], seconds: float) -> Group:
        specs = {
            arm: ArmSpec(
                folder=self.find_artefact(name),
                log_path=self._folder / "logs" / f"arm-{slug(arm)}.log",
                environment=list_environment(self._plans[name]),
            )
            for arm, name in arms.items()
        }
        begin_s, before_us = time.monotonic(), read_pressure().some_total_us
        try:
            with open_arms(specs) as live:
                turns = []
                for stage in stages:
                    for arm, order in stage.items():
                        live[arm].order = dict(order)
                    turns.append(run_group({arm: live[arm] for arm in stage}, seconds=seconds))
                facts = {arm: _describe_arm(one, [stage.get(arm) for stage in stages]) for arm, one in live.items()}
            seconds, after_us = time.monotonic() - begin_s, read_pressure().some_total_us
            waited_us = None if after_us is None or before_us is None else after_us - before_us
            pressure_pct = None if waited_us is None else waited_us / seconds / 1e4
            return Group(stages=tuple(turns), arms=facts, seconds=seconds, cpu_pressure_pct=pressure_pct)
        except ArmFailedError as error:
            return Group(stages=(), arms={}, failed=(error.name, error.status, error.reason))


def list_environment(plan: Plan) -> dict[str, str]:
    """List the variables that a plan needs a process to have before it loads torch."""
    from fulltilt.levers import load_inference_catalogue

    catalogue = load_inference_catalogue()
    return {n: text for name, value in plan.items() for n, text in catalogue[name].environment(value).items()}


def slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _describe_arm(arm: LiveArm, orders: Sequence[Order | None]) -> ArmFacts:
    return ArmFacts(
        cold_start_s=arm.ready["cold_start_s"],
        memory_gib=arm.memory_gib,
        lengths=tuple(arm.ready["lengths"]),
        calls_s=tuple(tuple(arm.read_calls_s(order)[:N_JITTER]) if order else () for order in orders),
    )
