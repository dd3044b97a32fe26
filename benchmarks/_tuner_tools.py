"""The peers that tune a training, each at its documented settings, and what each leaves the user with.

A tool is asked in a process of its own, ``python -m benchmarks._tuner_tools`` with the question as JSON; the last line
of its output is the answer. A peer is imported when it runs.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks._peers_finders import FINDERS
from benchmarks._peers_job import Job
from benchmarks._peers_process import describe_death
from benchmarks._runner import ROOT, silence_peers
from benchmarks._tuner_cases import CASES
from fulltilt.records import decode, encode

DEADLINE_S = 1200.0
N_FINDER_STEPS = 3  # a trial, Lightning's default
QUICK_BUDGET_S = 25


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a child is asked to do."""

    tool: str  # of TOOLS
    case: str  # of CASES
    device: str
    quick: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a tool left the user with.

    Attributes:
        settings: Lever → value, of those that it changed; None when it ended with an error, which ``failure`` tells.
        seconds: Of the tool's own call; starting Python, importing the peer and a first step are left out.
        said_speedup: Over the user's own settings, by the tool's own word; None where it said none.
        said_ci: The interval that it gave with it; None where it gave none.
        told: What else it said of its choice, and what of it our engine has no setting for.
    """

    settings: dict[str, Any] | None
    seconds: float
    said_speedup: float | None = None
    said_ci: tuple[float, float] | None = None
    failure: str | None = None
    told: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A peer that tunes a training. ``call`` is timed; what it returns is read by ``read``."""

    package: str
    loads: str  # imported before the clock starts
    call: Callable[[Job, Question], Any]
    read: Callable[[Any, Job], Left]  # its ``seconds`` are filled in by the caller
    settings: str  # as in the result file, with the link
    frees_batch: bool  # it may change the effective batch


def call_autotune(job: Job, question: Question) -> Any:
    """Give it model, first batch, loss and the optimizer by name: a function of ours would rule out ``fused``."""
    from pytorch_autotune import autotune

    batch_size = CASES[question.case].resolve(question.device).data.batch_size
    model = job.build_model()
    (group,) = job.build_optimizer(model).param_groups
    return autotune(
        model,
        tuple(next(iter(job.build_loader(batch_size)))),
        loss_fn=job.workload.loss,
        optimizer="adamw",
        lr=group["lr"],
        budget=QUICK_BUDGET_S if question.quick else "balanced",
        device=question.device,
        cache=False,
        verbose=False,
    )


def read_autotune(result: Any, job: Job) -> Left:
    config, report = result.config, result.report
    skipped = [trial.config.label for trial in report.trials if trial.status == "skipped"]
    failed = [f"{t.config.label} ({t.note})" for t in report.trials if t.status == "disqualified"]
    settings, told = translate_autotune(config.to_dict(), job.device.type)
    return Left(
        settings=settings,
        seconds=0.0,
        said_speedup=report.winner.speedup,
        told=(
            f"its winner is [{config.label}] of {len(report.trials)} candidates",
            *told,
            *([f"not tried for want of time: {', '.join(skipped)}"] if skipped else []),
            *([f"failed: {', '.join(failed)}"] if failed else []),
        ),
    )


def translate_autotune(chosen: Mapping[str, Any], device: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Turn its configuration into levers, and say where one of ours does not do the same."""
    on_gpu, told = device != "cpu", []
    precision = {"fp32_default": "fp32", "amp_bf16": "bf16", "amp_fp16": "fp16"}.get(chosen["precision"], "tf32")
    if precision == "tf32" and not on_gpu:
        precision = "fp32"
        told.append("tf32 is measured as fp32, which it is on a CPU")
    compile_value: bool | str = {"off": False, "default": True}.get(chosen["compile"], chosen["compile"])
    if compile_value == "reduce-overhead" and not on_gpu:
        compile_value = True
        told.append("reduce-overhead is measured as compile=True, which it is on a CPU: there are no CUDA graphs")
    elif compile_value == "max-autotune" and on_gpu:
        told.append("max-autotune is measured without its CUDA graphs")
    settings: dict[str, Any] = {
        "precision": precision,
        "compile": compile_value,
        "channels_last": chosen["channels_last"],
        "fused_optimizer": chosen["fused_opt"],
    }
    if on_gpu and chosen["precision"] != "fp32_default":
        settings["cudnn_benchmark"] = True
    return settings, tuple(told)


def call_finder(name: str) -> Callable[[Job, Question], int]:
    return lambda job, question: FINDERS[name].find(job, len(job.dataset))


def read_finder(found: int, job: Job) -> Left:
    """A loader with a larger batch than the data has gives all of it as one batch: that is what is measured."""
    n_samples = len(job.dataset)
    if found <= n_samples:
        return Left(settings={"batch_size": found}, seconds=0.0)
    told = f"it recommends {found}, the data has {n_samples}: one batch an epoch"
    return Left(settings={"batch_size": n_samples}, seconds=0.0, told=(told,))


_AUTOTUNE = "https://pypi.org/project/pytorch-autotune/2.0.0/"

TOOLS: dict[str, Tool] = {
    "pytorch-autotune": Tool(
        package="pytorch_autotune",
        loads="pytorch_autotune",
        call=call_autotune,
        read=read_autotune,
        settings=f"autotune(model, first batch, loss_fn, optimizer='adamw', budget='balanced'), no cache: {_AUTOTUNE}",
        frees_batch=False,
    ),
    **{
        name: Tool(
            package=FINDERS[name].package,
            loads=str(FINDERS[name].loads),
            call=call_finder(name),
            read=read_finder,
            settings=FINDERS[name].settings,
            frees_batch=True,
        )
        for name in ("lightning, power", "lightning, binsearch", "accelerate, default start")
    },
}


def is_available(tool: Tool) -> bool:
    return importlib.util.find_spec(tool.package) is not None


def ask_tool(question: Question, *, deadline_s: float = DEADLINE_S) -> Left:
    """Run the tool in a new process and read its answer; a process that dies becomes a failure that says so.

    Nothing that was compiled before is found by it: a user's first search has to compile, too.
    """
    command = [sys.executable, "-m", __name__, json.dumps(encode(question))]
    with tempfile.TemporaryDirectory(prefix="fulltilt-bench-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_CACHE_DIR": folder}
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline_s
            )
        except subprocess.TimeoutExpired:
            return Left(settings=None, seconds=deadline_s, failure=f"no answer after {deadline_s:g} s")
    if done.returncode:
        seconds = time.perf_counter() - started
        return Left(settings=None, seconds=seconds, failure=describe_death(done.returncode, done.stderr))
    return decode(Left, json.loads(done.stdout.splitlines()[-1]))


def main(question: Question) -> Left:
    tool, case = TOOLS[question.tool], CASES[question.case]
    job = Job(case.build_workload(question.device), device=question.device, n_steps=N_FINDER_STEPS)
    importlib.import_module(tool.loads)
    with silence_peers():
        job.run_steps(2)  # torch loads a part of itself with the first optimizer
        started = time.perf_counter()
        try:
            found = tool.call(job, question)
        except Exception as error:  # process boundary: what a tool does not survive is a finding
            seconds = time.perf_counter() - started
            return Left(settings=None, seconds=seconds, failure=f"{type(error).__name__}: {error}".splitlines()[0])
        seconds = time.perf_counter() - started
    return dataclasses.replace(tool.read(found, job), seconds=seconds)


if __name__ == "__main__":
    answer = main(decode(Question, json.loads(sys.argv[1])))
    print(json.dumps(encode(answer)))
