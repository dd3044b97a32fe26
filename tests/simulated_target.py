"""A target that answers from a function in place of a process; the contract suite of targets holds both."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fulltilt.records import Measurement, PhasesMs, Plan, Status, Trial
from fulltilt.tuner.trials.rows import build_row


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """How a simulated trial ends."""

    samples_per_s: float | None = None
    status: Status = "ok"
    reason: str | None = None
    memory_gib: float = 1.0
    spread_pct: float = 1.0  # half the width of the interval
    seconds: float = 1.0


class SimulatedTarget:
    """Plan → Trial by a function; keeps what it was asked.

    Args:
        answer: How a plan's trial ends.
        on_call: Called before each answer, for a test that counts or interrupts.
    """

    def __init__(self, answer: Callable[[Plan], Answer], *, on_call: Callable[[Plan], None] | None = None):
        self._answer, self._on_call = answer, on_call
        self.asked: list[Plan] = []

    def __call__(self, plan: Plan, *, id: str, why: str, kind: str = "end_to_end") -> Trial:
        if self._on_call is not None:
            self._on_call(plan)
        self.asked.append(plan)
        answer = self._answer(plan)
        measurement = _build_measurement(plan, answer) if answer.status == "ok" else None
        reason = None if answer.status == "ok" else answer.reason or f"simulated {answer.status}"
        return build_row(
            plan, id=id, why=why, kind=kind, status=answer.status, reason=reason, measurement=measurement,
            seconds=answer.seconds,
        )  # fmt: skip


def _build_measurement(plan: Plan, answer: Answer) -> Measurement:
    rate = answer.samples_per_s or 1.0
    half = rate * answer.spread_pct / 100
    step_ms = 1000 * plan.effective_batch_size / rate
    shares = {"data_wait": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1, "other": 0.0, "step": 1.0}
    phases = PhasesMs(h2d=None, **{name: share * step_ms for name, share in shares.items()})
    return Measurement(
        phases_ms=phases,
        samples_per_s=rate,
        samples_per_s_ci95=(rate - half, rate + half),
        block_samples_per_s=(rate - half, rate, rate + half),
        n_steps=24,
        n_warmup_steps=8,
        memory_rss_peak_gib=answer.memory_gib,
        null_reasons={},
        observed={"batch_size": plan["batch_size"]},
    )


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
