"""Runs a benchmark, in the environment it needs, and writes its result file.

A benchmark is a module of this package with ``NAME`` (that of its file), ``CLAIM`` (one sentence), ``DEVICES`` (where
it can run), ``NEEDS_PEERS`` (it runs in the peers' environment) and ``run(context) -> Findings``.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import importlib.metadata
import os
import pkgutil
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import benchmarks
from benchmarks._schema import Arm, BenchmarkResult, Target
from fulltilt.hardware import read_machine, read_pressure
from fulltilt.records import dumps
from fulltilt.records.run_folder import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PEERS = ROOT / ".venv-peers"
PEERS_OF_TESTS = ("transformers", "pytest", "pytest-timeout", "hypothesis")
TESTS_WITH_PEERS = ("tests/unit/integrations", "tests/unit/listeners/test_listeners_trackers.py")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    device: str
    quick: bool  # fewer repetitions: to see that it runs; never written as a result


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    arms: tuple[Arm, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()


def find_benchmarks() -> dict[str, ModuleType]:
    """All benchmarks by name. Importing one must not import a peer."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    modules = [importlib.import_module(f"benchmarks.{name}") for name in names]
    return {module.NAME: module for module in modules}


def run_benchmark(module: ModuleType, context: Context) -> BenchmarkResult:
    started = time.perf_counter()
    before = read_pressure().some_total_us
    findings = module.run(context)
    seconds = time.perf_counter() - started
    after = read_pressure().some_total_us
    packages = (
        "fulltilt",
        "torch",
        "lightning",
        "accelerate",
        "optuna",
        "timm",
        "torchvision",
        "spdl",
        "litdata",
        "h5py",
        "numpy",
        "pandas",
    )
    versions = {"python": platform.python_version()}
    return BenchmarkResult(
        name=module.NAME,
        claim=module.CLAIM,
        command=f"python -m benchmarks {module.NAME} --device {context.device}",
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=context.device,
        machine=read_machine(),
        versions=versions | {name: found for name in packages if (found := _read_version(name))},
        seconds=seconds,
        cpu_pressure_pct=None if before is None or after is None else (after - before) / seconds / 1e4,
        arms=findings.arms,
        targets=findings.targets,
        notes=findings.notes,
    )


def run_in_peers_environment(name: str, context: Context) -> int:
    """Run one benchmark with the peers' Python, building that environment first where it is missing."""
    command = [prepare_peers_environment(), "-m", "benchmarks", name, "--device", context.device, "--here"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*command, *(["--quick"] if context.quick else [])], cwd=ROOT, env=environment).returncode


def run_peer_tests(arguments: Sequence[str]) -> int:
    """Run pytest with the peers' Python: the tests of what meets their libraries skip anywhere else."""
    command = [prepare_peers_environment(), "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


def prepare_peers_environment() -> Path:
    """The peers' Python, its environment built where it is missing or older than its pins."""
    if not _is_current(PEERS / ".installed"):
        build_peers_environment()
    return PEERS / "bin" / "python"


def build_peers_environment() -> None:
    """A virtual environment of the peers' own: their pins never meet the product's."""
    print(f"building {PEERS.name} from constraints-bench.txt", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    pip = [PEERS / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints-bench.txt"]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, "lightning", "accelerate", "optuna", "pandas", "-e", f"{ROOT}[digits,export]"], check=True)
    subprocess.run([*pip, *PEERS_OF_TESTS, "-e", f"{ROOT}[mlflow,wandb]"], check=True)
    subprocess.run([*pip, "litdata", "spdl", "spdl-io"], check=True)
    subprocess.run([*pip, "--no-deps", "timm"], check=True)  # two functions of it; its torchvision would not load
    (PEERS / ".installed").touch()


def write_result(result: BenchmarkResult) -> Path:
    return write_atomic(RESULTS / f"{result.name}-{result.device}.json", dumps(result, indent=1) + "\n")


def describe_result(result: BenchmarkResult) -> str:
    pressure = (
        "" if result.cpu_pressure_pct is None else f", a task waited for a core {result.cpu_pressure_pct:.0f} % of it"
    )
    lines = [f"{result.name}: {result.claim}", f"  {result.device}, {result.seconds:.0f} s{pressure}"]
    for arm in result.arms:
        low, high = arm.ci95
        figure = f"{arm.median:>10.4g} ({low:.4g} to {high:.4g}) {arm.metric}, n={arm.n}"
        lines.append(f"  {arm.case:<28} {arm.arm:<14} {figure}")
    said = {True: "met", False: "MISSED", None: "undecided"}
    for target in result.targets:
        interval = "" if target.ci95 is None else " ({:.4g} to {:.4g})".format(*target.ci95)
        figure = f"{target.comparison} {target.limit:g}; measured {target.measured:.4g}{interval}: {said[target.met]}"
        lines.append(f"  target {target.name}: {figure}")
    return "\n".join([*lines, *(f"  note: {note}" for note in result.notes)])


def _is_current(marker: Path) -> bool:
    return marker.exists() and marker.stat().st_mtime >= (ROOT / "constraints-bench.txt").stat().st_mtime


def _read_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
