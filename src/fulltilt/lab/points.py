"""Turn a configuration file into the points of its grid, and a stored point into training arguments."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulltilt.config import Config, load_points
from fulltilt.config.loading import flatten
from fulltilt.errors import ConfigError
from fulltilt.lab.records import Point
from fulltilt.records.run_folder import compute_fingerprint

DEVICE, PROMISE = "run.device", "run.promise"
NOT_TRAINING = ("benchmark.", "targets.")  # sections that a training does not read
_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The grid of a configuration file.

    Attributes:
        source: The file; relative paths in the values start from its folder.
        points: The points of the grid, without duplicates.
        pool: ``run.device``: the devices that the experiments share, never an axis.
        n_devices: Of one experiment. A list of devices is shared by a grid, and spanned by one experiment alone.
    """

    source: Path
    points: tuple[Point, ...]
    pool: str | int | list[int]
    n_devices: int


def read_grid(path: str, overrides: Sequence[str]) -> Grid:
    """Read the grid of a file. Raises ConfigError if the file, a point or its devices are invalid."""
    found = load_points(path, overrides)
    pools = {json.dumps(config.run.device) for _, config in found}
    if len(pools) > 1:
        raise ConfigError(
            f"{' and '.join(sorted(pools))} as an axis: it is the pool that all experiments share; name it once",
            file=path,
            key=DEVICE,
        )
    first = found[0][1]
    device = first.run.device
    spanned = len(device) if len(found) == 1 and isinstance(device, list) else 1
    n_devices = max(spanned, first.run.n_ranks or 1)
    points = {point.digest: point for point in (_build_point(values, config) for values, config in found)}
    return Grid(source=Path(path).resolve(), points=tuple(points.values()), pool=device, n_devices=n_devices)


def build_words(config: Mapping[str, Any]) -> list[str]:
    """Return all values of a point as ``key=value`` arguments; later edits of the file have no effect."""
    return write_words({key: value for key, value in flatten(config).items() if _is_deciding(key)})


def write_words(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={_encode(value)}" for key, value in values.items()]


def list_dry_runs(points: Sequence[Point]) -> Iterator[Point]:
    """Choose the points to try before queueing: the first, and one for each further text value of an axis.

    Numbers are validated when the file is read.
    """
    seen: set[tuple[str, str]] = set()
    for index, point in enumerate(points):
        texts = {(key, value) for key, value in point.values.items() if isinstance(value, str)}
        if index == 0 or texts - seen:
            yield point
        seen |= texts


def _build_point(values: Mapping[str, Any], config: Config) -> Point:
    """Build a point. Its digest leaves defaults out, so a version with more keys finds the same experiments."""
    plain = config.to_values()
    said = {k: v for k, v in _list_said(plain, _list_defaults()).items() if _is_deciding(k) and k != PROMISE}
    return Point(values=values, config=plain, digest=compute_fingerprint(said))


def _is_deciding(key: str) -> bool:
    """Return whether a training's result depends on a setting, its device left out."""
    return key != DEVICE and not key.startswith(NOT_TRAINING)


def _list_said(values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return what differs from the defaults, by dotted key."""
    said: dict[str, Any] = {}
    for name, value in values.items():
        if value == defaults[name]:
            continue
        if isinstance(defaults[name], dict):  # a section: no setting is a mapping by default
            said |= _list_said(value, defaults[name], f"{prefix}{name}.")
        else:
            said[f"{prefix}{name}"] = value
    return said


@functools.cache
def _list_defaults() -> Mapping[str, Any]:
    return Config().to_values()
