"""Load a configuration: read, normalise, expand, resolve, validate. Every problem of a file is in one error."""

import contextlib
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
from fulltilt.config.model import Config, Section
from fulltilt.config.reading import Grid, build_branch, raise_problems, read_text, read_tree
from fulltilt.config.references import resolve_references
from fulltilt.config.settings import Collector, Setting, collect_overrides, merge, show_value
from fulltilt.errors import ConfigError

MAX_GRID_POINTS = 100_000

Axes = list[tuple[Grid, list[str]]]
"""Each grid with the keys that it sets together."""
_PARTS: Mapping[str, list[str]] = {key: key.split(".") for key in LEAVES}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load one configuration; ``overrides`` are ``key=value`` words that win over the file.

    Raises:
        ConfigError: every problem of the file with line, key, value and remedy; or the file is a grid.
    """
    points = _load(path, overrides)
    if points.n > 1:
        sizes = ", ".join(f"{' and '.join(keys)} × {len(grid.values)}" for grid, keys in points.axes)
        choice = " ".join(f"{keys[0]}={grid.values[0]}" for grid, keys in points.axes)
        raise ConfigError(
            f"makes a grid of {points.n} points ({sizes}) and one configuration is asked for; choose: {choice}; or run "
            f"all of them: {shlex.join(['fulltilt', 'lab', 'submit', '--local', str(path), *overrides])}",
            file=str(path),
        )
    return next(iter(points))[1]


def load_points(path: str | Path, overrides: Sequence[str] = ()) -> list[tuple[dict[str, Any], Config]]:
    """Load every point of the grid that a file describes, the last axis changing fastest.

    Returns:
        For each point the values that set it apart, by dotted key, and its configuration; of a file without a grid
        one point with ``{}``.

    Raises:
        ConfigError: as ``load_config``, or more than ``MAX_GRID_POINTS`` points.
    """
    points = _load(path, overrides)
    if points.n > MAX_GRID_POINTS:
        message = f"is a grid of {points.n} points, more than {MAX_GRID_POINTS}; shorten a list"
        raise ConfigError(message, file=str(path))
    return list(points)


def config_for_object(target: str, overrides: Sequence[str] = ()) -> Config:
    """Build the configuration of ``module:object``, a workload in the user's code: defaults, with ``overrides``."""
    settings, problems = merge(collect_overrides([f"task={json.dumps(target, ensure_ascii=False)}", *overrides]))
    _raise_with_rest([*problems, *_validate(settings)[1]], settings, base_dir=str(Path.cwd()))
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
    return {key: functools.reduce(operator.getitem, parts, values) for key, parts in _PARTS.items()}


def _load(path: str | Path, overrides: Sequence[str]) -> "_Points":
    """Load a file with all its problems checked, also those of each grid value on its own."""
    collector = Collector(str(path))
    collector.collect(read_tree(read_text(path), file=str(path)))
    settings, problems = merge(collector, collect_overrides(overrides))
    grids: dict[int, tuple[Grid, list[str]]] = {}
    for key, setting in settings.items():
        if isinstance(setting.value, Grid):
            grids.setdefault(id(setting.value), (setting.value, []))[1].append(key)
    axes = list(grids.values())
    points = _Points(settings, axes, path)
    first = _pick(settings, axes, [grid.values[0] for grid, _ in axes])
    _raise_with_rest([*problems, *points.check()], first, base_dir=str(Path(path).resolve().parent), source=str(path))
    return points


def _raise_with_rest(problems: Sequence[ConfigError], settings: Mapping[str, Setting], **origin: Any) -> None:
    """Raise one error of all problems, which holds the configuration without what was refused."""
    try:
        raise_problems(problems)
    except ConfigError as error:
        refused = {problem.key for problem in problems}
        with contextlib.suppress(ConfigError):
            error.rest = _build_config({k: s for k, s in settings.items() if k not in refused}, **origin)
        raise


class _Points:
    """Builds the points of a grid, the last axis changing fastest.

    A value is validated once and not at every point: no validator of ``Config`` looks at two keys.
    """

    def __init__(self, settings: Mapping[str, Setting], axes: Axes, path: str | Path):
        self.axes, self.n = axes, math.prod(len(grid.values) for grid, _ in axes)
        self._settings, self._path = settings, path
        self._known: dict[tuple[str, str], tuple[Any, Any]] = {}  # key, value as text → validated, and as plain data

    def check(self) -> list[ConfigError]:
        """Return the problems of the first point, and of each further value of each axis."""
        first = [grid.values[0] for grid, _ in self.axes]
        points = [first]
        for index, (grid, _) in enumerate(self.axes):
            points += [[*first[:index], value, *first[index + 1 :]] for value in grid.values[1:]]
        return [problem for point in points for problem in self._check_point(point)]

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Config]]:
        base, base_told = None, set[tuple[str, str]]()
        for chosen in itertools.product(*(grid.values for grid, _ in self.axes)):
            told = self._tell(chosen)
            if len(told) < len(self._settings) or not told <= self._known.keys():  # a reference joins several axes
                raise_problems(self._check_point(chosen))
            if base is None:
                settings, folder = _pick(self._settings, self.axes, chosen), Path(self._path).resolve().parent
                base, base_told = _build_config(settings, base_dir=str(folder), source=str(self._path)), told
            texts, changed = dict(told), {key: self._known[key, text][0] for key, text in told - base_told}
            values = {key: self._known[key, texts[key]][1] for _, keys in self.axes for key in keys}
            yield values, _alter(base, nest(changed))

    def _check_point(self, chosen: Sequence[Any]) -> list[ConfigError]:
        """Validate a point, keep its values, and return its problems."""
        config, problems = _validate(_pick(self._settings, self.axes, chosen))
        if config is not None:
            plain = flatten(config.to_values())
            for key, text in self._tell(chosen):
                self._known[key, text] = functools.reduce(getattr, _PARTS[key], config), plain[key]
        return problems

    def _tell(self, chosen: Sequence[Any]) -> set[tuple[str, str]]:
        """Return each key of the file with its value at a point, as text. So 1, 1.0 and true differ."""
        values = {key: setting.value for key, setting in self._settings.items()}
        for (_, keys), value in zip(self.axes, chosen, strict=True):
            values |= dict.fromkeys(keys, value)
        return {(key, repr(value)) for key, value in resolve_references(values)[0].items()}


def _alter(section: Any, changed: Mapping[str, Any]) -> Any:
    """Return a copy of a validated configuration, or a section of it, with other validated values (nested)."""
    for name, value in changed.items():
        if isinstance(inner := getattr(section, name), Section):
            changed = {**changed, name: _alter(inner, value)}
    return section.model_copy(update=changed)


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
