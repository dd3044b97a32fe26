"""Run a benchmark in the environment it needs, and write its result file.

A benchmark is a module of this package with ``CLAIM`` (one sentence), ``DEVICES`` (where it can run), ``NEEDS_PEERS``
(it runs in the peers' environment) and ``run(context) -> Findings``. One that needs more than its device has
``find_obstacle(context) -> str | None``, which says what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import importlib.metadata
import logging
import os
import pkgutil
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import benchmarks
import fulltilt
from benchmarks._schema import Arm, BenchmarkResult, Target
from fulltilt.hardware import read_machine, read_pressure
from fulltilt.records import dumps
from fulltilt.records.run_folder import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOT_CODE = "benchmarks/results"  # what one benchmark wrote does not make the next one's code another
PEERS = ROOT / ".venv-peers"
PEERS_OF_DATA = PEERS / "data_path"
PEERS_OF_SERVING = ("litserve",)
PEERS_OF_TRAINING = ("lightning", "accelerate", "pytorch-autotune", "optuna", "pandas")
PEERS_OF_TESTS = ("transformers", "pytest", "pytest-timeout", "hypothesis")
TESTS_WITH_PEERS = (
    "tests/unit/integrations", "tests/unit/listeners/test_listeners_trackers.py",
    "tests/unit/benchmarks/test_benchmarks_tuner_peers.py", "tests/unit/infer/test_infer_generate.py",
)  # fmt: skip
PACKAGES = (
    "fulltilt", "torch", "lightning", "accelerate", "pytorch-autotune", "optuna", "timm", "torchvision", "spdl",
    "litdata", "h5py", "numpy", "pandas", "fastapi", "litserve", "starlette", "uvicorn",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    device: str
    quick: bool  # fewer repetitions: to see that it runs; never written as a result
    n_repeats: int | None = None  # where a benchmark lets its repetitions be chosen; None: its own number

    @property
    def arguments(self) -> list[str]:
        """The words of the command line that ask for this."""
        repeats = [] if self.n_repeats is None else ["--repeats", str(self.n_repeats)]
        return ["--device", self.device, *repeats, *(["--quick"] if self.quick else [])]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    arms: tuple[Arm, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...] = ()


def find_benchmarks() -> dict[str, ModuleType]:
    """Return all benchmarks by name. Importing one must not import a peer."""
    names = [module.name for module in pkgutil.iter_modules(benchmarks.__path__) if not module.name.startswith("_")]
    return {name: importlib.import_module(f"benchmarks.{name}") for name in names}


def find_data(name: str) -> Path:
    """Return the path of a file among the data for tests and benchmarks.

    Raises:
        FileNotFoundError: it is not there.
    """
    path = Path(os.environ.get("FULLTILT_DATA", ROOT.parent / "shared" / "data")) / name
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; set FULLTILT_DATA to the folder that holds {name}")
    return path


def run_benchmark(name: str, module: ModuleType, context: Context) -> BenchmarkResult:
    code = read_code(ROOT, Path(fulltilt.__file__))  # before: an edit while it runs is of the next run
    started = time.perf_counter()
    before = read_pressure().some_total_us
    findings = module.run(context)
    seconds = time.perf_counter() - started
    after = read_pressure().some_total_us
    return BenchmarkResult(
        name=name,
        claim=module.CLAIM,
        command=" ".join(["python -m benchmarks", name, *context.arguments]),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        device=context.device,
        machine=read_machine(),
        versions={"python": platform.python_version()} | read_versions(PACKAGES),
        seconds=seconds,
        cpu_pressure_pct=None if before is None or after is None else (after - before) / seconds / 1e4,
        **code._asdict(),
        arms=findings.arms,
        targets=findings.targets,
        notes=findings.notes,
    )


class Code(NamedTuple):
    """The commit that runs, and whether the files differ from it; None where git does not say."""

    commit: str | None = None
    is_dirty: bool | None = None


def read_code(root: Path, package: Path) -> Code:
    """Return the commit of the checkout at ``root``; unknown where ``package`` is imported from elsewhere.

    A file that git does not track, and does not ignore, counts as a difference.
    """

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    if not package.resolve().is_relative_to(root.resolve()):
        return Code()
    try:
        changes = ask("status", "--porcelain", "--", ".", f":(exclude){NOT_CODE}")
        return Code(commit=ask("rev-parse", "--short=10", "HEAD"), is_dirty=bool(changes))
    except (OSError, subprocess.CalledProcessError):
        return Code()


def run_in_peers_environment(name: str, context: Context) -> int:
    """Run one benchmark with the peers' Python."""
    command = [prepare_peers_environment(), "-m", "benchmarks", name, *context.arguments, "--here"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def run_peer_tests(arguments: Sequence[str]) -> int:
    """Run pytest with the peers' Python: tests that need their libraries are skipped anywhere else."""
    command = [prepare_peers_environment(), "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode


def prepare_peers_environment() -> Path:
    """Return the peers' Python; build its environment where it is missing or older than its pins."""
    installed, pins = PEERS / ".installed", ROOT / "constraints-bench.txt"
    if not installed.exists() or installed.stat().st_mtime < pins.stat().st_mtime:
        build_peers_environment()
    return PEERS / "bin" / "python"


def build_peers_environment() -> None:
    """Install the peers into a virtual environment of their own: their pins never meet the product's."""
    print(f"building {PEERS.name} from constraints-bench.txt", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", PEERS], check=True)
    pip = [PEERS / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints-bench.txt"]
    subprocess.run([*pip, "torch"], check=True)
    subprocess.run([*pip, *PEERS_OF_TRAINING, *PEERS_OF_SERVING, "-e", f"{ROOT}[digits,export,lab]"], check=True)
    subprocess.run([*pip, *PEERS_OF_TESTS, "-e", f"{ROOT}[mlflow,wandb]"], check=True)
    subprocess.run([*pip, "spdl", "spdl-io", "boto3", "obstore", "requests", "tifffile"], check=True)
    # Apart: libraries that find a torchvision import it, and beside a CPU's torch that fails without help.
    subprocess.run([*pip, "--no-deps", "--target", PEERS_OF_DATA, "torchvision", "litdata"], check=True)
    subprocess.run([*pip, "--no-deps", "timm"], check=True)  # two functions of it; its torchvision would not load
    (PEERS / ".installed").touch()


def open_peers_of_data() -> None:
    """Make torchvision and LitData importable, which lie apart in the peers' environment."""
    if PEERS_OF_DATA.is_dir():
        sys.path.insert(0, str(PEERS_OF_DATA))


@contextlib.contextmanager
def silence_peers() -> Iterator[None]:
    """Suppress the peers' remarks, which hundreds of starts would repeat; errors pass."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def write_result(result: BenchmarkResult) -> Path:
    return write_atomic(RESULTS / f"{result.name}-{result.device}.json", dumps(result, indent=1) + "\n")


def read_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those that are installed."""
    installed = {found.name: found.version for found in importlib.metadata.distributions()}
    return {name: installed[name] for name in packages if name in installed}
