"""Check targets: train the model once, measure it in its own process, judge, keep a history."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fulltilt.config import Config, parse_call, plan_of
from fulltilt.engine.checkpoints.files import find_checkpoint
from fulltilt.errors import ConfigError, UsageError
from fulltilt.hardware import list_rank_devices, read_machine, resolve_device
from fulltilt.infer.artefact import read_manifest
from fulltilt.infer.load.outcome import Estimate, Verdict
from fulltilt.infer.manifest import Manifest
from fulltilt.infer.process import run_measuring
from fulltilt.infer.targets import (
    STATISTICS,
    Figure,
    Figures,
    Judged,
    Load,
    Target,
    estimate_figure,
    judge,
    judge_load,
    plan_load,
    plan_targets,
)
from fulltilt.infer.training import RESULTS, describe_training, find_training, run_training
from fulltilt.levers import list_environment
from fulltilt.records import VERSION, Machine, decode, encode
from fulltilt.records.run_folder import RunFolder, append_line, read_lines, write_atomic
from fulltilt.report.latency import build_latency_page, count_histogram

HISTORY, LOG, LATENCIES = "history.jsonl", "measuring.log", "latency.html"
TIMES: tuple[Figure, ...] = ("response_s", "batch_latency_ms", "first_token_s")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckPlan:
    """A check, decided before any process is started.

    Attributes:
        weights: Folder of the training to measure; None: train in the check's own folder, or measure untrained weights.
        artefact: Folder of what is measured instead.
        must_train: Whether the check trains the model itself.
    """

    config: Config
    name: str
    targets: tuple[Target, ...]
    load: Load
    device: str
    weights: Path | None
    artefact: Path | None
    must_train: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """The result of a check; ``--json`` writes its fields in this order.

    Attributes:
        times: Latency and response under the load: name → statistic → figure; empty without a load.
        inputs: Where the samples of the requests come from.
        weights: The measured checkpoint and its training metrics; None: the model as its function built it.
        keeps_up: Whether the model answers requests faster than they arrive; None: there is no load.
        memory_gib: Peak of the device used, from the built model to the last answer; the mean is over the same time.
        levers: Levers of inference, read back from the measuring process; of an artefact, those of its manifest.
        histogram: Of the response where there is one, else of the latency: two bounds in ms, requests between them.
        null_reasons: What is null → why.
    """

    version: int
    targets: tuple[Judged, ...]
    met: bool
    keeps_up: Verdict | None
    workload: str
    device: str
    load: Load
    samples_per_hour: Estimate
    memory_gib: float
    memory_mean_gib: float
    times: dict[str, dict[str, Estimate]]
    inputs: str
    weights: dict[str, Any] | None
    levers: dict[str, Any]
    n_parameters: int
    notes: tuple[str, ...]
    utc: str
    out_dir: str
    machine: Machine
    histogram: tuple[tuple[float, float, int], ...]
    null_reasons: dict[str, str]


def plan_check(
    config: Config, *, weights: str | None = None, artefact: str | None = None, needs_targets: bool = True
) -> CheckPlan:
    """Plan a check from a configuration, or say why it cannot be checked.

    Args:
        needs_targets: Whether there have to be any; a search may be for the most of what there is.

    Raises:
        ConfigError: no target, a load that is missing, several devices.
        UsageError: ``weights`` holds no checkpoint, ``artefact`` none of this task.
        DeviceError: the device is not there.
    """
    targets = plan_targets(config, needs_any=needs_targets)
    load = plan_load(config, targets)
    folder = None if weights is None else Path(weights)
    if folder is not None and not find_checkpoint(folder):
        raise UsageError(f"--weights {folder} holds no checkpoint; name the folder of a training")
    manifest = None if artefact is None else _read_artefact(config, artefact)
    return CheckPlan(
        config=config,
        name=config.run_name,
        targets=tuple(targets),
        load=load,
        device=manifest.device if manifest else _choose_device(config),
        weights=folder,
        artefact=None if artefact is None else Path(artefact),
        must_train=not (folder or manifest) and ":" not in parse_call(config.task).name,
    )


def open_check_folder(plan: CheckPlan, out_dir: Path) -> RunFolder:
    """Open and lock the folder of a check. A training of another configuration in it is set aside.

    Raises:
        RunFolderError: another process holds it, or it is the folder of another command.
    """
    parts = {"training": describe_training(plan.config)}
    claim: dict[str, Any] = {"fingerprint_parts": parts, "command": "infer check", "results": RESULTS}
    return RunFolder(out_dir, **claim, writes=RESULTS, aging=("training",))


def prepare_weights(plan: CheckPlan, folder: RunFolder, words: Sequence[str]) -> tuple[Path | None, bool]:
    """Return the folder of the weights to measure, and whether they were trained just now with ``words``."""
    if not plan.must_train:
        return plan.weights, False
    found = find_training(folder.path)
    return (found, False) if found else (run_training(words, folder.path), True)


def build_request(plan: CheckPlan, weights: Path | None) -> dict[str, Any]:
    """Build what a process is told that builds the model."""
    config = plan.config
    source = {"config": config.to_values(), "base_dir": config.base_dir, "provenance": config.provenance}
    return source | {"device": plan.device, "weights": None if weights is None else str(weights)}


def run_check(
    plan: CheckPlan, out_dir: Path, weights: Path | None, *, on_progress: Callable[[int, int], None]
) -> CheckResult:
    """Measure in a process of its own and judge every target.

    Raises:
        FulltiltError: nothing could be measured; see ``run_measuring``.
    """
    request = {**build_request(plan, weights), "load": encode(plan.load), "targets": encode(plan.targets)}
    request["artefact"] = plan.artefact and str(plan.artefact)
    environment = {} if plan.artefact else list_environment(plan_of(plan.config))
    measured = run_measuring(request, log_path=out_dir / LOG, on_progress=on_progress, environment=environment)
    figures = decode(Figures, measured.pop("figures"))
    load = dataclasses.replace(plan.load, n_requests=len(figures.response_s))
    judged = tuple(judge(target, figures, load) for target in plan.targets)
    names = TIMES[load.scenario == "offline" :]
    timed = {name: values_s for name in names if len(values_s := np.sort(figures.read_s(name)))}
    if timed:
        curves_ms = {name: (1000 * values_s).tolist() for name, values_s in timed.items()}
        write_atomic(out_dir / LATENCIES, build_latency_page(f"fulltilt infer check: {plan.name}", curves_ms))
    times = {name: {which: estimate_figure(name, which, figures, load) for which in STATISTICS} for name in timed}
    is_bounded = np.isfinite([each.ci95 for found in times.values() for each in found.values()]).all()
    return CheckResult(
        version=VERSION,
        targets=judged,
        met=all(target.met for target in judged),
        keeps_up=judge_load(figures, load) if load.requests_per_s else None,
        workload=plan.name,
        device=plan.device,
        load=load,
        samples_per_hour=estimate_figure("samples_per_hour", None, figures, load),
        memory_gib=figures.memory_peak_gib,
        memory_mean_gib=figures.memory_mean_gib,
        times=times,
        **measured,
        utc=datetime.now(UTC).isoformat(timespec="seconds"),
        out_dir=str(out_dir),
        machine=read_machine(),
        histogram=tuple(count_histogram(next(iter(timed.values())))) if timed else (),
        null_reasons={} if is_bounded else {"times": "too few requests for a bound"},
    )


def append_history(folder: RunFolder, result: CheckResult) -> None:
    line = {name: value for name, value in encode(result).items() if name not in ("machine", "histogram")}
    append_line(folder.path / HISTORY, json.dumps(line, ensure_ascii=False))


def read_previous(folder: RunFolder, result: CheckResult) -> dict[str, float]:
    """Return what the previous check of the same weights, device and load measured for each target."""
    found, mine = dict[str, float](), _name_measured(encode(result))
    for text in read_lines(folder.path / HISTORY):
        with contextlib.suppress(ValueError, LookupError, TypeError):  # what was damaged tells nothing
            if _name_measured(line := json.loads(text)) == mine:
                found |= {target["name"]: float(target["measured"]) for target in line["targets"]}
    return found


def _name_measured(line: Mapping[str, Any]) -> list[Any]:
    weights, load = line["weights"] or {}, line["load"]
    named = [load[name] for name in ("requests_per_s", "samples_per_request", "scenario")]
    return [line["device"], weights.get("checkpoint"), *named]


def _read_artefact(config: Config, folder: str) -> Manifest:
    manifest, targets = read_manifest(Path(folder)), config.targets
    own, asked = ({**values, **values["data"]} for values in (manifest.config["config"], config.to_values()))
    for key in ("task", "model", "dataset"):
        if own[key] != asked[key]:
            raise UsageError(f"--artefact {folder} has {key} {own[key]}, the configuration {asked[key]}; name another")
    if targets.first_token_s or targets.tokens_per_s:
        raise UsageError("an artefact answers whole samples: check first_token_s and tokens_per_s without --artefact")
    return manifest


def _choose_device(config: Config) -> str:
    names = list_rank_devices(config.run.device, config.run.n_ranks, has_gpu=lambda: resolve_device("auto") != "cpu")
    if len(names) > 1:
        said = f"names {len(names)} devices ({', '.join(names)}), a check measures one; give --device {names[0]}"
        raise ConfigError(said, key="run.device")
    return resolve_device(names[0])
