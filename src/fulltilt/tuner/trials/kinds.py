"""Do what a trial process can be asked for: one function a kind, chosen by the table at the end.

A trial over several ranks starts them as ``train`` does and answers for all. No rank outlives it: each ends with its
connection to it, and the trial server ends whatever is below it.
"""

import dataclasses
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from fulltilt.errors import UsageError
from fulltilt.hardware import proctree
from fulltilt.records import Event, TrialRequest, decode, encode
from fulltilt.tuner.trials.measuring import (
    Answer,
    Link,
    Measure,
    build_request,
    explain_workers,
    measure_built,
    report_parts_of,
)

TAKE_BLOCK, END = "block", "end"  # orders of a kind "turns"
DEADLINE_SHARE = 0.75  # of the trial's usual deadline: a rank that hangs is named before the trial is ended as a whole


def run_request(message: Mapping[str, Any], answer: Answer) -> None:
    """Do what one request asks for, by its kind."""
    request = decode(TrialRequest, message)
    KINDS[request.kind](request, answer)


def run_trial(request: TrialRequest, answer: Answer) -> None:
    """Measure one plan, in this process or in one process a device.

    Raises:
        FulltiltError: the workload cannot be built or measured; and whatever the user's code raises.
    """
    from fulltilt.engine.measured.measurement import run_measured

    if request.rank_devices:
        run_rank_trial(request, answer)
    else:
        _measure_here(report_parts_of(run_measured, answer), request, answer)


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


def run_device_probe(request: TrialRequest, answer: Answer) -> None:
    """Measure steps on batches that lie on the device already."""
    from fulltilt.engine.measured import probes

    _measure_here(report_parts_of(probes.run_device_probe, answer), request, answer)


def run_loader_probe(request: TrialRequest, answer: Answer) -> None:
    """Measure the loader without a step."""
    from fulltilt.engine.measured import probes

    _measure_here(probes.run_loader_probe, request, answer)


def run_fit_probe(request: TrialRequest, answer: Answer) -> None:
    """Take a few steps, to see whether memory is enough for them and what comes beside them."""
    from fulltilt.engine.measured import fits

    _measure_here(report_parts_of(fits.run_fit_probe, answer), request, answer)


def run_inference_probe(request: TrialRequest, answer: Answer) -> None:
    """Answer a few batches as the model does when it is served."""
    from fulltilt.engine.measured import fits

    _measure_here(fits.run_inference_probe, request, answer)


def _measure_here(measure: Measure, request: TrialRequest, answer: Answer) -> None:
    from fulltilt.engine.measured.probes import use_share_of_cores

    if request.rank_devices:
        use_share_of_cores(len(request.rank_devices))
    with build_request(request, answer) as run:
        answer({"measurement": encode(measure_built(measure, run, request, answer))})


def run_turns(request: TrialRequest, answer: Answer) -> None:
    """Take a block of steps at each order, until the other side says to end or is gone."""
    from fulltilt.engine.measured.turns import BlockRunner

    assert isinstance(answer, Link)
    # A data worker that is stopped together with this process would not see its end.
    os.register_at_fork(after_in_child=lambda: proctree.set_death_signal(signal.SIGKILL))
    with build_request(request, answer) as run, explain_workers():
        answer({"progress": {"stage": "built"}})
        turns = BlockRunner(run)
        turns.warm_up()
        answer({"blocks": 0})
        for number, order in enumerate(answer.take_orders(), start=1):
            if order != TAKE_BLOCK:
                break
            answer({"block": encode(turns.take_block()), "blocks": number})


def run_memory_probe(request: TrialRequest, answer: Answer) -> None:
    """Estimate the memory of one plan without a step and answer with a Measurement of that figure."""
    from fulltilt.engine.measured import probes

    with build_request(request, answer) as run:
        answer({"measurement": encode(probes.run_memory_probe(run))})


def run_roofs(request: TrialRequest, answer: Answer) -> None:
    """Measure what this device reaches at matmul and copy, for ``max_measure_s``."""
    from fulltilt.measure import measure_roofs

    assert request.max_measure_s is not None
    answer({"roofs": encode(measure_roofs(request.device, seconds=request.max_measure_s))})


def run_facts(request: TrialRequest, answer: Answer) -> None:
    """Build the run without a step and answer with what guards, the report and a promise need to know of it.

    Raises:
        UsageError: the run cannot be divided over the ranks of the request, whatever the plan: many trials would say
            so.
    """
    from fulltilt.engine.build.assemble import name_origins
    from fulltilt.engine.build.facts import describe_data, name_device, name_model
    from fulltilt.engine.ranks.division import find_obstacles

    with build_request(request, answer) as run:
        model, optimizer = run.setup.model, run.setup.optimizer
        n_ranks = max(1, len(request.rank_devices))
        if obstacles := find_obstacles(n_ranks, n_ranks, run.config, run.workload, model):
            raise UsageError("; ".join(obstacles))
        workload = {
            "name": run.workload.name,
            "model": name_model(model),
            "n_parameters": sum(p.numel() for p in model.parameters()),
            "n_samples": run.n_samples,
            "data": describe_data(run.dataset, run.facts),
            "device_name": name_device(run.device),
            "optimizer": type(optimizer).__name__,
            "learning_rate": float(optimizer.param_groups[0]["lr"]),
            "taken_from": name_origins(run.config, run.workload),
            "notes": list(run.notes),
        }
        answer({"facts": encode(run.facts), "workload": workload})


KINDS: Mapping[str, Callable[[TrialRequest, Answer], None]] = {
    "trial": run_trial,
    "turns": run_turns,
    "device": run_device_probe,
    "loader": run_loader_probe,
    "memory": run_memory_probe,
    "fit": run_fit_probe,
    "inference": run_inference_probe,
    "roofs": run_roofs,
    "facts": run_facts,
}
