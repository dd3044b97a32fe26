"""Writes and reads the speed that a search measured of a plan, which trainings are held to."""

import dataclasses
from pathlib import Path

from fulltilt.records._codec import dumps, loads
from fulltilt.records.run_folder import write_atomic


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """Holds the speed that a search measured of a plan, and of what that is true.

    That is the plan, the machine and its device, the model and the data; what it says nothing of may be any.
    """

    samples_per_s: tuple[float, float]  # lowest, highest
    plan: str
    machine: str
    device: str | None = None
    model: str | None = None
    n_parameters: int | None = None
    data: str | None = None
    threads: int | None = None
    data_wait_pct: float | None = None
    n_ranks: int = 1
    cpu_pressure_pct: float | None = None  # of a busy machine: why it is so wide


def write_promise(folder: Path, promise: Promise) -> Path:
    """Write the promise into the folder of its search, by its plan: one search may be applied to several files.

    Raises StorageError as ``write_atomic``.
    """
    return write_atomic(folder / f"promise-{promise.plan}.json", dumps(promise, indent=1) + "\n")


def read_promise(path: Path) -> Promise | str:
    """Read a promise, or why it cannot be read."""
    try:
        promise = loads(Promise, path.read_bytes())
        low, high = promise.samples_per_s
        return promise if 0 < low <= high else f"samples_per_s is {low} to {high}"
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, RecursionError) as error:  # cut short, or another file
        return str(error)
