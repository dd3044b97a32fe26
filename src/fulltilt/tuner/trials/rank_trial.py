"""Run a trial over several ranks: its process starts them as ``train`` does, and answers for all.

No rank outlives it: each ends with its connection to it, and the trial server ends whatever is below it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fulltilt.records import Event, TrialRequest, decode, encode
from fulltilt.tuner.trials.measuring import Answer, build_request, measure_built, report_parts_of

DEADLINE_SHARE = 0.75  # of the trial's usual deadline: a rank that hangs is named before the trial is ended as a whole


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrialAnswered(Event):
    """An answer of rank 0 while the trial runs."""

    message: dict[str, Any]


def run_rank_trial(request: TrialRequest, answer: Answer) -> None:
    """Measure one plan in one process a device, and answer with the Measurement that they have in common.

    Raises:
        DeviceMemoryError: a rank ran out of memory. RankFailedError: one died; RankHungError: one hung; both name it.
        FulltiltError: one raised it.
    """
    from fulltilt.engine.announce import Announcer
    from fulltilt.engine.loop.launch import choose_hang_limit_s
    from fulltilt.engine.ranks.group import run_ranks

    def hand_on(event: Event) -> None:
        assert isinstance(event, TrialAnswered)
        answer(event.message)

    limit_s = DEADLINE_SHARE * request.patience_s
    hang_limit_s = choose_hang_limit_s(
        request.source.config["run"]["hang_timeout_s"], compiles=bool(request.plan["compile"])
    )
    measurement = run_ranks(
        measure_as_rank,
        {"message": encode(request)},
        devices=request.rank_devices,
        announcer=Announcer([hand_on]),
        on_start=lambda pids: answer({"progress": {"stage": "ranks", "pids": pids}}),
        hang_limit_s=min(hang_limit_s, limit_s),
        start_limit_s=limit_s,
        raised_by=("--deadline", "--deadline" if limit_s < hang_limit_s else "run.hang_timeout_s"),
    )
    answer({"measurement": measurement})


def measure_as_rank(message: Mapping[str, Any]) -> dict[str, Any]:
    """Measure the request's plan as one rank, and return the encoded Measurement that all have in common."""
    from fulltilt.engine.measured.measurement import run_measured
    from fulltilt.engine.ranks.process import find_link
    from fulltilt.engine.ranks.world import join_devices

    request, link = decode(TrialRequest, message), find_link()
    assert link is not None

    def answer(said: Mapping[str, Any]) -> None:
        if link.rank == 0:
            link.send_event(TrialAnswered(message=dict(said)))

    world, device = join_devices(request.rank_devices)
    request = dataclasses.replace(request, device=device)
    with build_request(request, answer, world=world) as run:
        return encode(measure_built(report_parts_of(run_measured, answer), run, request, answer))
