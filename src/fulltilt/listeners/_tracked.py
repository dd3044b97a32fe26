"""What trackers share: the curves and settings that they are told, and the name that they gave a run."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fulltilt.errors import StorageError, UsageError
from fulltilt.records import EpochDone, Evaluated, RunStarted, StepsDone
from fulltilt.records.run_folder import write_atomic
from fulltilt.records.settings import flatten_settings

FILE = "run_id"
WithFigures = StepsDone | EpochDone | Evaluated


def import_package(name: str, *, logger: str, extra: str) -> Any:
    """Import what a logger needs.

    Raises:
        UsageError: it is not installed; names the extra that installs it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"the {logger} logger needs the package {name.split('.')[-1]} ({error}); pip install 'fulltilt[{extra}]', "
            f"or leave {logger} out of run.loggers"
        ) from error


@contextlib.contextmanager
def storage_errors(kind: type[Exception], what: str, lost: str) -> Iterator[None]:
    """Raise a tracker's own errors, and the system's, as ``StorageError``: training goes on without it."""
    try:
        yield
    except (kind, OSError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise StorageError(f"{what}: {first_line}; {lost}") from error


def list_scalars(event: WithFigures) -> dict[str, float]:
    """List ``train/loss``, ``epoch/accuracy``, ``val/accuracy`` and the like, at ``event.step``."""
    if isinstance(event, StepsDone):
        figures = {f"train/{name}": getattr(event, name) for name in ("loss", "lr", "samples_per_s")}
        phases = {f"phases_ms/{phase}": value for phase, value in event.phases_ms.items() if value is not None}
        return figures | phases
    if isinstance(event, EpochDone):
        return {f"epoch/{name}": value for name, value in {"loss": event.loss, **event.metrics}.items()}
    return {f"{event.split}/{name}": value for name, value in event.metrics.items()}


def list_settings(event: RunStarted) -> dict[str, Any]:
    """List ``data.batch_size`` …, ``plan.precision`` … as they run, and facts of the run. Nulls are left out."""
    facts = {
        name: getattr(event, name) for name in ("device", "n_parameters", "n_samples", "n_epochs", "config_digest")
    }
    named = dict(flatten_settings(event.config)) | {f"plan.{name}": value for name, value in event.plan.items()} | facts
    return {name: value for name, value in named.items() if value is not None}


def read_run_id(folder: Path, *, first_step: int) -> str | None:
    """Read the name that a tracker gave the run that is resumed; None for a run that starts at its first step."""
    path = folder / FILE
    return path.read_text(encoding="utf-8").strip() or None if first_step and path.exists() else None


def write_run_id(folder: Path, run_id: str) -> None:
    write_atomic(folder / FILE, f"{run_id}\n")
