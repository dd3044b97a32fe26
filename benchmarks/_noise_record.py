"""Records how the time of one and the same training step varies on this machine, for the benchmark ``decisions``.

    python -m benchmarks._noise_record small_cnn --conditions shared --processes 5 --seconds 40

One process after the other builds the run as a trial does, takes steps for ``WARMUP_S`` and then times every step by
the wall clock, with the device synchronised at its end. Nothing is kept quiet and nothing is left out: whatever else
runs on the machine is in the recording. ``--device cuda`` does the same on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._noise import RECORDINGS, VERSION, Recording, Stretch
from benchmarks._runner import ROOT
from fulltilt.hardware import read_machine, read_pressure
from fulltilt.records import encode
from fulltilt.records.run_folder import write_atomic

WORKLOADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "small_cnn": (str(ROOT / "configs" / "digits.yaml"), {"data.batch_size": 16}),
    "tabular_mlp": ("benchmarks._tabular:workload", {"data.batch_size": 64}),
}
"""Name → what is trained, and its settings beside ``ALWAYS``."""

ALWAYS = {"data.num_workers": 0, "speed.threads": 1}
"""One thread: two on two busy cores wait for each other, and a step of 2 ms was seen to take a second."""

WARMUP_S = 3.0


def record_stretch(name: str, device: str, seconds: float, *, warmup_s: float = WARMUP_S) -> Stretch:
    """Time steps of one workload in this process."""
    import torch

    from fulltilt.config import plan_of
    from fulltilt.engine.build.builder import build_run
    from fulltilt.engine.measured.endless_steps import EndlessSteps
    from fulltilt.measure import NullTimer
    from fulltilt.tuner.question.source import resolve_target

    target, settings = WORKLOADS[name]
    config = resolve_target(target, {**ALWAYS, **settings, "run.device": device}).config
    with build_run(config, plan_of(config), device=device) as run:
        step = EndlessSteps(run, NullTimer())

        def take_step() -> None:
            step()
            if run.device.type == "cuda":
                torch.cuda.synchronize(run.device)

        warm_until = time.perf_counter() + warmup_s
        while time.perf_counter() < warm_until:
            take_step()
        return time_steps(take_step, seconds)


def time_steps(take_step: Callable[[], None], seconds: float) -> Stretch:
    """Take steps for ``seconds`` and time each from the end of the one before: nothing lies between two steps."""
    pressure_before_us = read_pressure().some_total_us
    begin_ns = last_ns = time.perf_counter_ns()
    step_us = []
    while last_ns - begin_ns < seconds * 1e9:
        take_step()
        now_ns = time.perf_counter_ns()
        step_us.append(round((now_ns - last_ns) / 1e3))
        last_ns = now_ns
    pressure_after_us = read_pressure().some_total_us
    took_us = (last_ns - begin_ns) / 1e3
    pressure_pct = None
    if pressure_before_us is not None and pressure_after_us is not None:
        pressure_pct = 100 * (pressure_after_us - pressure_before_us) / took_us
    return Stretch(step_us=tuple(step_us), seconds=took_us / 1e6, cpu_pressure_pct=pressure_pct)


def record(
    name: str, conditions: str, device: str, *, n_processes: int, seconds: float, arguments: Sequence[str]
) -> Iterator[Recording]:
    """One stretch per fresh process; the recording so far after each. Cost: ``seconds`` + start and warm-up each."""
    target, settings = WORKLOADS[name]
    recording = Recording(
        version=VERSION,
        name=name,
        conditions=conditions,
        device=device,
        command="python -m benchmarks._noise_record " + " ".join(arguments),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        how=f"wall time of each step in µs, after {WARMUP_S:g} s of warm-up, device synchronised after each step; one "
        "process after the other, on the machine as it was, other programs included",
        workload=target.removeprefix(f"{ROOT}/"),
        settings={**ALWAYS, **settings},
        machine=encode(read_machine()),
        python=platform.python_version(),
        stretches=(),
    )
    command = [sys.executable, "-m", "benchmarks._noise_record", name, "--device", device, "--in-this-process"]
    command += ["--seconds", str(seconds)]
    for _ in range(n_processes):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        stretch = Stretch.from_json(json.loads(done.stdout))
        recording = dataclasses.replace(recording, stretches=(*recording.stretches, stretch))
        yield recording


def write_recording(recording: Recording, folder: Path = RECORDINGS) -> Path:
    return write_atomic(
        folder / f"noise-{recording.name}-{recording.conditions}-{recording.device}.json", recording.to_text()
    )


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks._noise_record", description=__doc__)
    parser.add_argument("name", choices=list(WORKLOADS))
    parser.add_argument(
        "--conditions", default="shared", metavar="WORD", help="what else ran: idle, shared, overcommitted"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=45.0, help="of each process")
    parser.add_argument("--in-this-process", action="store_true", help="one stretch, as JSON to stdout")
    args = parser.parse_args(words)
    if args.in_this_process:
        print(json.dumps(encode(record_stretch(args.name, args.device, args.seconds))))
        return 0
    asked = {"n_processes": args.processes, "seconds": args.seconds, "arguments": words}
    for number, recording in enumerate(record(args.name, args.conditions, args.device, **asked), start=1):
        path = write_recording(recording)  # after each process: an interruption loses one
        n_steps = len(recording.stretches[-1].step_us)
        print(f"process {number} of {args.processes}: {n_steps} steps; {path}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
