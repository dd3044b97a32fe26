"""A target that answers from a function in place of a process; the contract suite of targets holds both."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping

from fulltilt.records import IN_TURNS, Measurement, PhasesMs, Plan, Status, Trial
from fulltilt.records.trial import TurnsWay
from fulltilt.stats import Turns
from fulltilt.tuner.trials.rows import build_row, build_turns_row


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """How a simulated trial ends."""

    samples_per_s: float | None = None
    status: Status = "ok"
    reason: str | None = None
    memory_gib: float = 1.0
    spread_pct: float = 1.0  # half the width of the interval
    seconds: float = 1.0
    stalled_pct: float = 0.0  # of the time of a turn


class SimulatedTarget:
    """Plan → Trial by ``answer``; keeps what it was asked.

    Args:
        in_turns: How a plan ends that takes turns with others; None: as it does alone.
        on_call: Comes before each process, to count or interrupt.
        noise_pct: Standard deviation of what processes of one plan in turns differ by.
        drift_pct: Of what groups differ by, each plan of a group alike.
        way: How plans of a group take turns.
    """

    def __init__(
        self,
        answer: Callable[[Plan], Answer],
        *,
        in_turns: Callable[[Plan], Answer] | None = None,
        on_call: Callable[[Plan], None] = lambda plan: None,
        noise_pct: float = 0.0,
        drift_pct: float = 0.0,
        seed: int = 0,
        way: TurnsWay = "usual",
    ):
        self._answer, self._in_turns, self._on_call = answer, in_turns or answer, on_call
        self._noise, self._drift, self._rng = noise_pct / 100, drift_pct / 100, random.Random(seed)
        self._way: TurnsWay = way
        self.asked: list[Plan] = []  # each by itself
        self.groups: list[tuple[Plan, ...]] = []

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = "end_to_end") -> Trial:
        self._on_call(plan)
        self.asked.append(plan)
        answer = self._answer(plan)
        if answer.status != "ok":
            return _build_failed(plan, answer, id=id, why=why, kind=kind)
        end = {"status": "ok", "reason": None, "measurement": _build_measurement(plan, answer)}
        return build_row(plan, id=id, why=why, kind=kind, seconds=answer.seconds, **end)

    def run_group(self, plans: Mapping[str, Plan], *, why: str) -> list[Trial]:
        self.groups.append(tuple(plans.values()))
        level, rows = self._rng.gauss(0, self._drift), []
        for id, plan in plans.items():
            self._on_call(plan)
            answer = self._in_turns(plan)
            if answer.status != "ok":
                return [_build_failed(plan, answer, id=id, why=why, kind=IN_TURNS)]
            rate = (answer.samples_per_s or 1.0) * math.exp(level + self._rng.gauss(0, self._noise))
            turns = Turns(samples_per_s=rate, stalled_pct=answer.stalled_pct, way=self._way)
            rows.append(build_turns_row(plan, turns, id=id, why=why, seconds=answer.seconds))
        return rows


def _build_failed(plan: Plan, answer: Answer, **asked: str) -> Trial:
    reason = answer.reason or f"simulated {answer.status}"
    return build_row(plan, status=answer.status, reason=reason, seconds=answer.seconds, **asked)


def _build_measurement(plan: Plan, answer: Answer) -> Measurement:
    rate = answer.samples_per_s or 1.0
    half = rate * answer.spread_pct / 100
    step_ms = 1000 * plan.effective_batch_size / rate
    shares = {"data_wait": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "other": 0.0, "step": 1.0}
    return Measurement(
        phases_ms=PhasesMs(h2d=None, **{name: share * step_ms for name, share in shares.items()}),
        samples_per_s=rate, samples_per_s_ci95=(rate - half, rate + half),
        block_samples_per_s=(rate - half, rate, rate + half), n_steps=24, n_warmup_steps=8,
        memory_rss_peak_gib=answer.memory_gib, null_reasons={}, observed={"batch_size": plan["batch_size"]},
    )  # fmt: skip


class Clock:
    """Seconds that pass only while a simulated trial runs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def time(self, rate: Callable[[Plan], float], seconds: Callable[[Plan], float]) -> Callable[[Plan], Answer]:
        """How a trial ends that takes so long."""

        def answer(plan: Plan) -> Answer:
            self.now_s += seconds(plan)
            return Answer(samples_per_s=rate(plan), seconds=seconds(plan))

        return answer
