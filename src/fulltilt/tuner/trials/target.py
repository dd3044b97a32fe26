"""Turn a plan into a trial: what a search optimises."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fulltilt import errors
from fulltilt.errors import FulltiltError, NoPlanError, TrainingError
from fulltilt.levers import Facts, list_environment
from fulltilt.records import (
    IN_TURNS,
    PROBES,
    WHOLE_RUN,
    Measurement,
    Plan,
    Roof,
    Trial,
    TrialRequest,
    classify_outcome,
    decode,
)
from fulltilt.tuner.trials.client import ANSWER_LIMIT_S, START_LIMIT_S, Zygote, Zygotes
from fulltilt.tuner.trials.live import MIN_ANSWER_S, ArmFailedError, GroupRunner, name_log
from fulltilt.tuner.trials.process import ProcessOutcome, run_trial_process
from fulltilt.tuner.trials.rows import build_row, build_trial, build_turns_row

BUDGET_GONE = "the budget was gone before the first run: {}; give a larger --budget"
LOGS = ("zygote.log", "logs")  # of trial processes, in the folder of a search
PROBE_ID = "facts"
ROOFS_ID = "roofs"
ROOFS_MEASURE_S = 1.5


class Target(Protocol):
    """Turns a plan into a trial. What goes wrong inside one never raises: it is a status and a reason.

    A trial has the plan, id, kind and why it was asked for, a figure exactly when its status is ok (``samples_per_s``;
    of kind "memory" the estimated ``memory_allocated_peak_gib``), a reason exactly when it is not, and a null reason
    for every null figure. A group has a row of each plan, by id, or of those alone that failed.
    """

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = WHOLE_RUN) -> Trial: ...

    def run_group(self, plans: Mapping[str, Plan], *, why: str) -> list[Trial]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProbeResult:
    """Facts of the built workload, for guards and for the report."""

    facts: Facts
    workload: dict[str, Any]


@dataclasses.dataclass
class ProcessTarget:
    """Runs each plan in a process of its own, forked from a server that has torch loaded.

    Over several ranks a probe takes one rank's part of the batch on one device, and its rate counts for all of them.
    """

    usual: TrialRequest  # what all requests share: without id, plan and kind
    folder: Path  # where the logs of the trials go, one file each
    _: dataclasses.KW_ONLY
    zygote: Zygote | None = None
    on_progress: Callable[[str, Mapping[str, Any]], None] | None = None  # gets the trial's id and each sign of life
    end_s: float | None = None  # of the budget, on ``time.monotonic``: nothing is waited for beyond it; None: never

    def __post_init__(self) -> None:
        self._zygotes = Zygotes(self.zygote or Zygote(self.folder / "zygote.log"))
        self._n_ranks = max(1, len(self.usual.rank_devices))
        self.runner = GroupRunner(self._start_zygote, self.folder)

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = WHOLE_RUN) -> Trial:
        request = self._build_request(plan, id, kind if kind in PROBES else "trial")
        is_part = kind in PROBES and self._n_ranks > 1
        if is_part:
            request = take_part(request, self._n_ranks)
        try:
            outcome = self._run(request)
        except TrainingError as error:
            if not self._is_over:
                raise
            reason = str(error)
            return build_row(plan, id=id, why=why, kind=kind, status="timeout", reason=reason, n_devices=self._n_ranks)
        if is_part and outcome.measurement is not None:
            n_parts = plan["batch_size"] / request.plan["batch_size"]  # all wait for the rank with the largest
            outcome = dataclasses.replace(outcome, measurement=count_for_ranks(outcome.measurement, n_parts))
        return build_trial(
            plan, outcome, id=id, why=why, kind=kind, n_devices=self._n_ranks,
            memory_limit_bytes=request.memory_limit_bytes,
        )  # fmt: skip

    def run_group(self, plans: Mapping[str, Plan], *, why: str) -> list[Trial]:
        """Have fresh processes of the plans take turns; return a row of each by its id, or of those that failed."""
        requests = {id: self._build_request(plan, id, "trial") for id, plan in plans.items()}
        begin_s = time.monotonic()
        try:
            end_s = math.inf if self.end_s is None else self.end_s
            turns = self.runner({id: self._limit(request) for id, request in requests.items()}, end_s=end_s)
        except (ArmFailedError, TrainingError) as error:
            if isinstance(error, ArmFailedError):
                id, status, reason = str(error.name), error.status, error.reason
            elif self._is_over:
                id, status, reason = next(iter(plans)), "timeout", str(error)
            else:
                raise
            seconds = time.monotonic() - begin_s
            return [
                build_row(
                    plans[id], id=id, why=why, kind=IN_TURNS, status=status, reason=reason, seconds=seconds,
                    n_devices=self._n_ranks,
                )
            ]  # fmt: skip
        each_s = (time.monotonic() - begin_s) / len(plans)
        return [
            build_turns_row(plan, turns[id], id=id, why=why, seconds=each_s, n_devices=self._n_ranks)
            for id, plan in plans.items()
        ]

    def close(self) -> None:
        """End the servers and whatever still runs below them."""
        self._zygotes.close()

    def read_facts(self, plan: Plan) -> ProbeResult:
        """Build the workload once, in a process of its own, and read what guards need to know.

        Raises:
            NoPlanError: the budget ended first. FulltiltError: the workload cannot be built; of the class raised there.
        """
        try:
            outcome = self._run(self._build_request(plan, PROBE_ID, "facts"))
        except TrainingError as error:
            if self._is_over:
                raise NoPlanError(BUDGET_GONE.format(error)) from None
            raise
        if outcome.evidence.deadline and self._is_over:
            raise NoPlanError(BUDGET_GONE.format("building the workload took longer") + f" (log: {outcome.log_path})")
        if "facts" in outcome.reply and outcome.evidence.exit_code == 0:
            return ProbeResult(facts=decode(Facts, outcome.reply["facts"]), workload=outcome.reply["workload"])
        raise _build_error(outcome)

    def read_roofs(self, plan: Plan) -> tuple[Roof, ...]:
        """Measure the roofs of the device in a process of its own; empty when that failed (its log says why)."""
        request = self._build_request(plan, ROOFS_ID, "roofs")
        try:
            outcome = self._run(dataclasses.replace(request, max_measure_s=ROOFS_MEASURE_S))
        except TrainingError:
            if not self._is_over:
                raise
            return ()  # the budget ended while a zygote that had died was started again
        return tuple(decode(Roof, roof) for roof in outcome.reply.get("roofs", ()))

    @property
    def _is_over(self) -> bool:
        return self.end_s is not None and time.monotonic() >= self.end_s

    def _compute_limit_s(self, usual_s: float) -> float:
        """Cut a time limit to what is left of the budget."""
        return usual_s if self.end_s is None else min(usual_s, max(MIN_ANSWER_S, self.end_s - time.monotonic()))

    def _build_request(self, plan: Plan, id: str, kind: str) -> TrialRequest:
        usual = self.usual
        limit_bytes = None if kind == "memory" else usual.memory_limit_bytes  # its estimate allocates nothing
        return dataclasses.replace(
            usual, id=id, plan=plan, kind=kind, memory_limit_bytes=limit_bytes, patience_s=usual.deadline_s
        )

    def _start_zygote(self, environment: Mapping[str, str]) -> Zygote:
        """Have the server of an environment started, before a trial's own time begins."""
        zygote = self._zygotes.find(environment)
        zygote.start_limit_s = self._compute_limit_s(START_LIMIT_S)
        zygote.answer_limit_s = self._compute_limit_s(ANSWER_LIMIT_S)
        zygote.start()
        return zygote

    def _limit(self, request: TrialRequest) -> TrialRequest:
        """Cut the deadline to what is left of the budget."""
        return dataclasses.replace(request, deadline_s=self._compute_limit_s(request.deadline_s))

    def _run(self, request: TrialRequest) -> ProcessOutcome:
        tell, zygote = self.on_progress, self._start_zygote(list_environment(request.plan))
        return run_trial_process(
            self._limit(request),
            zygote=zygote,
            log_path=name_log(self.folder, request),
            on_progress=None if tell is None else lambda values: tell(request.id, values),
        )


def take_part(request: TrialRequest, n_ranks: int) -> TrialRequest:
    """Give one rank's part of the batch, the largest, to training and evaluation."""
    config: dict[str, Any] = dict(request.source.config)
    data = config.get("data") or {}
    if data.get("val_batch_size"):
        config["data"] = {**data, "val_batch_size": math.ceil(data["val_batch_size"] / n_ranks)}
    return dataclasses.replace(
        request,
        plan=request.plan.replace(batch_size=math.ceil(request.plan["batch_size"] / n_ranks)),
        source=dataclasses.replace(request.source, config=config),
    )


def count_for_ranks(part: Measurement, n_parts: float) -> Measurement:
    """Scale what one rank's part measured alone to all ranks, as if none were in another's way."""
    rate, interval = part.samples_per_s, part.samples_per_s_ci95
    return dataclasses.replace(
        part,
        samples_per_s=None if rate is None else rate * n_parts,
        samples_per_s_ci95=None if interval is None else (interval[0] * n_parts, interval[1] * n_parts),
        block_samples_per_s=tuple(rate * n_parts for rate in part.block_samples_per_s),
        notes=(*part.notes, f"one rank's part of the batch on one device; its rate counts {n_parts:g} times"),
    )


def _build_error(outcome: ProcessOutcome) -> FulltiltError:
    """Build the error of a workload that cannot be built, of the class it had in its process."""
    status, reason = classify_outcome(outcome.evidence)
    cls = getattr(errors, outcome.evidence.exception_type or "", None)
    said = outcome.evidence.message
    if isinstance(cls, type) and issubclass(cls, errors.UsageError) and said:
        return errors.UsageError(said) if cls is errors.ConfigError else cls(said)
    if status == "ok":
        reason = "it sent no facts"
    elif status == "out_of_memory":
        reason = f"{reason}; give a larger --memory-limit"
    return NoPlanError(f"the workload cannot be built: {reason} (log: {outcome.log_path})")
