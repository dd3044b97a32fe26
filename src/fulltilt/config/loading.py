"""Load a configuration: read, normalise, expand, resolve, validate. Every problem of a file is in one error."""

import dataclasses
import difflib
import functools
import itertools
import json
import math
import operator
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fulltilt.config.hints import describe_type
from fulltilt.config.leaves import LEAVES
from fulltilt.config.model import Config
from fulltilt.config.reading import Grid, build_branch, raise_problems, read_text, read_tree
from fulltilt.config.references import resolve_references
from fulltilt.config.settings import Collector, Setting, collect_overrides, merge, show_value
from fulltilt.errors import ConfigError

MAX_GRID_POINTS = 100_000

Axes = list[tuple[Grid, list[str]]]
"""Each grid with the keys that it sets together."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load one configuration; ``overrides`` are ``key=value`` words that win over the file.

    Raises:
        ConfigError: every problem of the file with line, key, value and remedy; or the file is a grid.
    """
    settings, axes = _load_settings(path, overrides)
    n_points = math.prod(len(grid.values) for grid, _ in axes)
    if n_points > 1:
        sizes = ", ".join(f"{' and '.join(keys)} × {len(grid.values)}" for grid, keys in axes)
        choice = " ".join(f"{keys[0]}={grid.values[0]}" for grid, keys in axes)
        raise ConfigError(
            f"is a grid of {n_points} points ({sizes}) and one configuration is asked for; choose: {choice}; or run "
            f"all of them: {shlex.join(['fulltilt', 'lab', 'submit', '--local', str(path), *overrides])}",
            file=str(path),
        )
    return next(config for _, config in _expand(settings, axes, path))


def load_points(path: str | Path, overrides: Sequence[str] = ()) -> list[tuple[dict[str, Any], Config]]:
    """Load every point of the grid that a file describes, the last axis changing fastest.

    Returns:
        For each point the values that set it apart, by dotted key, and its configuration; of a file without a grid
        one point with ``{}``.

    Raises:
        ConfigError: as ``load_config``, or more than ``MAX_GRID_POINTS`` points.
    """
    settings, axes = _load_settings(path, overrides)
    n_points = math.prod(len(grid.values) for grid, _ in axes)
    if n_points > MAX_GRID_POINTS:
        message = f"is a grid of {n_points} points, more than {MAX_GRID_POINTS}; shorten a list"
        raise ConfigError(message, file=str(path))
    return list(_expand(settings, axes, path))


def config_for_object(target: str, overrides: Sequence[str] = ()) -> Config:
    """Build the configuration of ``module:object``, a workload in the user's code: defaults, with ``overrides``."""
    settings, problems = merge(collect_overrides([f"task={json.dumps(target, ensure_ascii=False)}", *overrides]))
    raise_problems(problems)
    return _build_config(settings, base_dir=str(Path.cwd()))


def config_from_values(
    values: Mapping[str, Any], *, base_dir: str, provenance: Mapping[str, str] | None = None
) -> Config:
    """Build a Config from plain values; the inverse of ``Config.to_values``. A list is never a grid here.

    Args:
        provenance: Where values came from before they became plain, by dotted key.

    Raises:
        ConfigError: as ``load_config``, without lines.
    """
    collector = Collector("values", with_grids=False)
    collector.collect(build_branch(values))
    settings, problems = merge(collector)
    raise_problems(problems)
    config = _build_config(settings, base_dir=base_dir)
    config._provenance |= {key: place for key, place in (provenance or {}).items() if key in config._provenance}
    return config


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn ``{"data.batch_size": 8}`` into ``{"data": {"batch_size": 8}}``."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``nest`` for a complete set of values."""
    return {key: functools.reduce(operator.getitem, key.split("."), values) for key in LEAVES}


def _load_settings(path: str | Path, overrides: Sequence[str]) -> tuple[dict[str, Setting], Axes]:
    """Load the settings of a file with all its problems checked, also those of each grid value on its own."""
    collector = Collector(str(path))
    collector.collect(read_tree(read_text(path), file=str(path)))
    settings, problems = merge(collector, collect_overrides(overrides))
    grids: dict[int, tuple[Grid, list[str]]] = {}
    for key, setting in settings.items():
        if isinstance(setting.value, Grid):
            grids.setdefault(id(setting.value), (setting.value, []))[1].append(key)
    axes = list(grids.values())
    # The first point, then every further value of every axis once: a sum, not the product.
    first = [grid.values[0] for grid, _ in axes]
    points = [first]
    for index, (grid, _) in enumerate(axes):
        points += [[*first[:index], value, *first[index + 1 :]] for value in grid.values[1:]]
    for point in points:
        problems += _validate(_pick(settings, axes, point))[1]
    raise_problems(problems)
    return settings, axes


def _expand(settings: Mapping[str, Setting], axes: Axes, path: str | Path) -> Iterator[tuple[dict[str, Any], Config]]:
    base_dir = str(Path(path).resolve().parent)
    for chosen in itertools.product(*(grid.values for grid, _ in axes)):
        config = _build_config(_pick(settings, axes, chosen), base_dir=base_dir, source=str(path))
        values = flatten(config.to_values()) if axes else {}
        yield {key: values[key] for _, keys in axes for key in keys}, config


def _pick(settings: Mapping[str, Setting], axes: Axes, chosen: Sequence[Any]) -> dict[str, Setting]:
    """Return the settings of one point of a grid."""
    point = dict(settings)
    for (_, keys), value in zip(axes, chosen, strict=True):
        point |= {key: dataclasses.replace(settings[key], value=value) for key in keys}
    return point


def _build_config(settings: Mapping[str, Setting], *, base_dir: str, source: str | None = None) -> Config:
    """Build a Config of settings that hold no grid, or raise all their problems."""
    config, problems = _validate(settings)
    raise_problems(problems)
    assert config is not None
    config._base_dir, config._source = base_dir, source
    config._provenance = {key: settings[key].provenance if key in settings else "default" for key in LEAVES}
    return config


def _validate(settings: Mapping[str, Setting]) -> tuple[Config | None, list[ConfigError]]:
    """Resolve references and validate settings that hold no grid."""
    values, unresolved = resolve_references({key: s.value for key, s in settings.items()})
    try:
        config, refused = Config.model_validate(nest(values)), {}
    except ValidationError as error:
        config, refused = None, _describe_invalid(error, values, settings)
    messages = refused | unresolved
    return config, [settings[key].build_error(message) for key, message in messages.items()]


def _describe_invalid(
    error: ValidationError, values: Mapping[str, Any], settings: Mapping[str, Setting]
) -> dict[str, str]:
    """Return a message for every leaf that pydantic refused: its value, what is expected, the nearest choice."""
    problems: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        parts = [str(part) for part in detail["loc"]]
        key = next(key for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in LEAVES)
        problems.setdefault(key, _describe_detail(key, detail, values.get(key), settings[key].spelled))
    return problems


def _describe_detail(key: str, detail: Any, value: Any, alias: str) -> str:
    hint, name, said = LEAVES[key].hint, key.rpartition(".")[2], detail["msg"].removeprefix("Value error, ")
    if detail["type"] != "value_error":
        words = describe_type(hint)
        near = difflib.get_close_matches(str(detail["input"]), words.split(" or "), n=1, cutoff=0.5)
        is_close = near and isinstance(detail["input"], str)
        words = words.replace("a number", "a finite number") if detail["type"] == "finite_number" else words
        said = f"expected {words}" + (f"; did you mean {near[0]}?" if is_close else "")
    given = "" if alias.rpartition(".")[2] == name else f" (given as {alias})"
    shown = show_value(value)
    if not said.startswith(shown):
        return f"{name} {shown}{given}: {said}"
    return f"{name}{given}: {said}" if given else said  # the key stands before it
