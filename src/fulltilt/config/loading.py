"""Load a configuration: read, normalise, expand, resolve, validate. Every problem of a file is in one error."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fulltilt.config.calls import ComponentCall
from fulltilt.config.hints import describe_type
from fulltilt.config.leaves import LEAVES
from fulltilt.config.model import Config
from fulltilt.config.reading import Grid, build_branch, read_text, read_tree
from fulltilt.config.references import resolve_references
from fulltilt.config.settings import Collector, Problem, Setting, collect_overrides, merge, raise_problems
from fulltilt.errors import ConfigError

MAX_GRID_POINTS = 100_000

Axes = list[tuple[Grid, tuple[str, ...]]]


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load one configuration; ``overrides`` are ``key=value`` words that win over the file.

    Raises:
        ConfigError: every problem of the file with line, key, value and remedy; or the file is a grid.
    """
    settings = _load_settings(path, overrides)
    axes = find_axes(settings)
    n_points = math.prod(len(grid.values) for grid, _ in axes)
    if n_points > 1:
        sizes = ", ".join(f"{' and '.join(keys)} × {len(grid.values)}" for grid, keys in axes)
        choice = " ".join(f"{keys[0]}={grid.values[0]}" for grid, keys in axes)
        raise ConfigError(
            f"is a grid of {n_points} points ({sizes}) and one configuration is asked for; choose: {choice}",
            file=str(path),
        )
    return next(config for _, config in _expand(settings, axes, path))


def load_grid(path: str | Path, overrides: Sequence[str] = ()) -> list[Config]:
    """Load every point of the grid that a file describes, the last axis changing fastest.

    Raises:
        ConfigError: as ``load_config``, or more than ``MAX_GRID_POINTS`` points.
    """
    return [config for _, config in load_points(path, overrides)]


def load_points(path: str | Path, overrides: Sequence[str] = ()) -> list[tuple[dict[str, Any], Config]]:
    """Load every point of a grid with the values that set it apart, by dotted key; of a file without one, ``{}``.

    Raises:
        ConfigError: as ``load_grid``.
    """
    settings = _load_settings(path, overrides)
    axes = find_axes(settings)
    n_points = math.prod(len(grid.values) for grid, _ in axes)
    if n_points > MAX_GRID_POINTS:
        raise ConfigError(
            f"is a grid of {n_points} points, more than {MAX_GRID_POINTS}; shorten a list", file=str(path)
        )
    return list(_expand(settings, axes, path))


def config_for_object(target: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a workload in the user's code, ``module:object``: defaults, and ``overrides`` on top.

    Raises:
        ConfigError: as ``load_config``, without lines.
    """
    settings, problems = merge(collect_overrides([f"task={target}", *overrides]))
    if problems:
        raise_problems(problems)
    return build_config(settings, base_dir=str(Path.cwd()), source=None)


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
    if problems:
        raise_problems(problems)
    config = build_config(settings, base_dir=base_dir, source=None)
    config._provenance |= {key: place for key, place in (provenance or {}).items() if key in config._provenance}
    return config


def build_config(settings: Mapping[str, Setting], *, base_dir: str, source: str | None) -> Config:
    """Resolve references and validate settings that hold no grid.

    Raises:
        ConfigError: all problems.
    """
    values, unresolved = resolve_references({key: s.value for key, s in settings.items()})
    problems = [_place(message, settings.get(key), key) for key, message in unresolved.items()]
    config = None
    try:
        config = Config.model_validate(nest(values))
    except ValidationError as error:
        problems += [p for p in describe_invalid(error, values, settings) if p.key not in unresolved]
    if problems or config is None:
        raise_problems(problems)
    config._base_dir, config._source = base_dir, source
    config._provenance = {key: settings[key].provenance if key in settings else "default" for key in LEAVES}
    return config


def find_axes(settings: Mapping[str, Setting]) -> Axes:
    """Each grid with the keys it sets together."""
    axes: dict[int, tuple[Grid, list[str]]] = {}
    for key, setting in settings.items():
        if isinstance(setting.value, Grid):
            axes.setdefault(id(setting.value), (setting.value, []))[1].append(key)
    return [(grid, tuple(keys)) for grid, keys in axes.values()]


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"data.batch_size": 8}`` → ``{"data": {"batch_size": 8}}``."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``nest`` for a complete set of values."""
    flat = {}
    for key in LEAVES:
        value: Any = values
        for part in key.split("."):
            value = value[part]
        flat[key] = value
    return flat


def _load_settings(path: str | Path, overrides: Sequence[str]) -> dict[str, Setting]:
    """Settings of a file with all its problems checked, also those of each grid value on its own."""
    collector = Collector(str(path))
    collector.collect(read_tree(read_text(path), file=str(path)))
    settings, problems = merge(collector, collect_overrides(overrides))
    problems += _check_each_value(settings)
    if problems:
        raise_problems(problems)
    return settings


def _check_each_value(settings: Mapping[str, Setting]) -> list[Problem]:
    """Validate the first point, then every further value of every axis once: a sum, not the product."""
    axes = find_axes(settings)
    first = _pick(settings, axes, [grid.values[0] for grid, _ in axes])
    points = [first]
    for grid, keys in axes:
        points += [{**first, **{k: _with_value(settings[k], v) for k in keys}} for v in grid.values[1:]]
    problems: list[Problem] = []
    for point in points:
        values, unresolved = resolve_references({key: s.value for key, s in point.items()})
        problems += [_place(message, settings.get(key), key) for key, message in unresolved.items()]
        try:
            Config.model_validate(nest(values))
        except ValidationError as error:
            problems += describe_invalid(error, values, settings)
    return problems


def _expand(settings: Mapping[str, Setting], axes: Axes, path: str | Path) -> Iterator[tuple[dict[str, Any], Config]]:
    base_dir = str(Path(path).resolve().parent)
    for chosen in itertools.product(*(grid.values for grid, _ in axes)):
        config = build_config(_pick(settings, axes, chosen), base_dir=base_dir, source=str(path))
        values = flatten(config.to_values()) if axes else {}
        yield {key: values[key] for _, keys in axes for key in keys}, config


def _pick(settings: Mapping[str, Setting], axes: Axes, chosen: Sequence[Any]) -> dict[str, Setting]:
    point = dict(settings)
    for (_, keys), value in zip(axes, chosen, strict=True):
        point.update({key: _with_value(settings[key], value) for key in keys})
    return point


def _with_value(setting: Setting, value: Any) -> Setting:
    return dataclasses.replace(setting, value=value)


def _place(message: str, setting: Setting | None, key: str) -> Problem:
    if setting is None:
        return ConfigError(message, key=key)
    return ConfigError(message, file=setting.file, line=setting.line, key=key)


def describe_invalid(
    error: ValidationError, values: Mapping[str, Any], settings: Mapping[str, Setting]
) -> list[Problem]:
    """One problem for every leaf that pydantic refused: its value, what is expected, the nearest choice."""
    problems: dict[str, Problem] = {}
    for detail in error.errors(include_url=False):
        key = _find_leaf(detail["loc"])
        if key in problems:
            continue
        said = detail["msg"].removeprefix("Value error, ")
        name, shown = key.rpartition(".")[2], _show_value(values.get(key))
        inside = _find_inside(key, detail["loc"])
        if inside is not None:
            name, shown = f"{name}.{inside}", "" if detail["type"] == "missing" else _show_value(detail["input"])
            said = _WORDS.get(detail["type"], said)
        elif _list_sections(key):
            said = f"expected the keys of {name}, as fulltilt tune --apply writes them, or null"
        elif detail["type"] != "value_error":
            said = f"expected {describe_type(LEAVES[key].hint)}" if key in LEAVES else said
            if detail["type"] == "finite_number":
                said = said.replace("a number", "a finite number")
            said += _suggest_choice(key, detail)
        alias = settings[key].spelled if key in settings else key
        spelled = "" if inside or alias.rpartition(".")[2] == name else f" (given as {alias})"
        value = "" if not shown or said.startswith(shown) else f" {shown}"
        problems[key] = _place(f"{name}{value}{spelled}: {said}", settings.get(key), key)
    return list(problems.values())


_WORDS = {"missing": "is missing", "extra_forbidden": "is no key of it"}


def _find_inside(key: str, location: tuple[int | str, ...]) -> str | None:
    """The key inside a leaf that is a section of its own, ``run.promise``."""
    names = {kind.__name__ for kind in _list_sections(key)}
    inside = [str(part) for part in location[key.count(".") + 1 :] if part not in names]
    return inside[0] if names and inside else None


def _list_sections(key: str) -> list[Any]:
    hints = typing.get_args(LEAVES[key].hint) if key in LEAVES else ()
    return [hint for hint in hints if hasattr(hint, "model_fields")]


def _find_leaf(location: tuple[int | str, ...]) -> str:
    parts = [str(part) for part in location]
    for size in range(len(parts), 0, -1):
        key = ".".join(parts[:size])
        if key in LEAVES:
            return key
    return ".".join(parts)


def _suggest_choice(key: str, detail: Any) -> str:
    """The nearest of the allowed names, where the type is a choice."""
    allowed = describe_type(LEAVES[key].hint).split(" or ") if key in LEAVES else []
    near = difflib.get_close_matches(str(detail["input"]), allowed, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near and isinstance(detail["input"], str) else ""


def _show_value(value: Any) -> str:
    if isinstance(value, ComponentCall):
        return str(value)
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
