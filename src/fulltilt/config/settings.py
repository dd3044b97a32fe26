"""Turn a tree as the user spelled it into settings by canonical key; all problems are collected, then raised."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from fulltilt.config.aliases import (
    CALL_SECTION,
    FOREIGN_SECTIONS,
    Spelling,
    resolve_section,
    resolve_spelling,
    suggest_names,
)
from fulltilt.config.calls import ComponentCall, format_value, parse_call
from fulltilt.config.hints import admits
from fulltilt.config.leaves import LEAVES, SECTIONS
from fulltilt.config.reading import COMMAND_LINE, Branch, Grid, Item, read_value, to_plain
from fulltilt.errors import ConfigError, format_nearest
from fulltilt.levers import load_catalogue


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value at one canonical key, and where it stands."""

    key: str
    value: Any  # plain, or a Grid
    spelled: str
    file: str
    item: Item
    argument: str | None = None  # of the component call that stands at ``spelled``

    @property
    def line(self) -> int | None:
        return self.item.line

    @property
    def provenance(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        if self.spelled == self.key and not self.argument:
            return place
        section, _, bare = self.spelled.rpartition(".")
        return f"alias {bare if section in (*SECTIONS, *FOREIGN_SECTIONS) else self.spelled} ({place})"

    def build_error(self, message: str) -> ConfigError:
        return ConfigError(message, file=self.file, line=self.line, key=self.key)


class Collector:
    """Collects the settings and the problems of one file or one set of values."""

    def __init__(self, file: str, *, with_grids: bool = True):
        self.file, self.with_grids = file, with_grids
        self.settings: list[Setting] = []
        self.problems: list[ConfigError] = []

    def collect(self, branch: Branch, prefix: str = "") -> None:
        for item in branch.items:
            self.collect_item(item, f"{prefix}{item.key}")

    def collect_item(self, item: Item, spelled: str) -> None:
        """Collect the settings of one key, or its problem."""
        try:
            self._read_item(item, spelled)
        except ConfigError as error:
            self.problems.append(ConfigError(error.message, file=self.file, line=item.line, key=spelled))

    def _read_item(self, item: Item, spelled: str) -> None:
        section, spelling = resolve_section(spelled), resolve_spelling(spelled)
        if spelled.partition(".")[0] == CALL_SECTION:
            self._read_loader(item, spelled)
        elif section and isinstance(item.value, Branch):
            self.collect(item.value, f"{section}.")
        elif spelling is not None:
            value = self._convert(to_plain(item.value), spelling)
            for key in spelling.keys:
                self._add(item, spelled, key, value)
        elif section and item.value is not None:
            raise ConfigError(f"is a section and holds keys, not {show_value(item.value)}")
        elif not section:
            remedy = _suggest_mapping(spelled, item) or suggest_names(spelled)
            raise ConfigError(f"unknown key with the value {show_value(item.value)}; {remedy}")

    def _convert(self, value: Any, spelling: Spelling) -> Any:
        """Return the keys' value; a list at a key of a single value is a grid's axis, and so is ``!grid`` anywhere."""
        if isinstance(value, list) and self.with_grids and not LEAVES[spelling.keys[0]].is_list:
            value = Grid(tuple(value))
        values = value.values if isinstance(value, Grid) else (value,)
        if any(map(_holds_grid, values)):
            raise ConfigError("has a grid inside a value; !grid belongs right behind the key")
        if not values:
            raise ConfigError("is an empty list, so there is no value to run; name one")
        converted = tuple(map(spelling.convert, values))
        return Grid(converted) if isinstance(value, Grid) else converted[0]

    def _add(self, item: Item, spelled: str, key: str, value: Any, argument: str | None = None) -> None:
        setting = Setting(key=key, value=value, spelled=spelled, file=self.file, item=item, argument=argument)
        self.settings.append(setting)

    def _read_loader(self, item: Item, spelled: str) -> None:
        """Read ``dataloader`` or one of its splits: a component call whose arguments are keys of ``data``."""
        if item.value is None:
            return
        if isinstance(item.value, Branch) and spelled == CALL_SECTION:
            self.collect(item.value, f"{CALL_SECTION}.")
            return
        split = spelled.partition(".")[2] or "train"
        if split not in ("train", "val") or not isinstance(item.value, str):
            remedy = "write train: basic(shuffle=true), val: basic()"
            raise ConfigError(f"no loader {split!r} can be made of {show_value(item.value)}; {remedy}")
        call = parse_call(item.value)
        if call.name != "basic" or call.args:
            remedy = format_nearest(call.name, ["basic"])
            raise ConfigError(f"unknown loader {call}; write basic(name=value, …); {remedy}")
        fixed = {"split": split} if split == "train" else {"split": split, "shuffle": False, "drop_last": False}
        valid = ["split", *(key.removeprefix("data.") for key in LEAVES if key.startswith("data."))]
        problems = []
        for name, value in call.kwargs.items():
            said = f"{name}={show_value(value)}"
            if name in fixed:
                if value != fixed[name]:
                    problems.append(f"{said} in the {split} loader must be {show_value(fixed[name])}")
            elif name not in valid or name in ("dataset", "path", "val_dataset", "val_batch_size"):
                problems.append(f"unknown argument {said}; {format_nearest(name, valid)}")
            else:
                is_val_size = split == "val" and name == "batch_size"
                self._add(item, spelled, "data.val_batch_size" if is_val_size else f"data.{name}", value, name)
        if problems:
            raise ConfigError("; ".join(problems))


def collect_overrides(overrides: Sequence[str]) -> Collector:
    """Read ``key=value`` words of a command line; the value is YAML, the key may be any accepted spelling."""
    collector = Collector(COMMAND_LINE)
    for text in overrides:
        key, equals, value_text = str(text).partition("=")
        if not equals or not key.strip():
            message = f"{text!r} is not key=value; write for instance data.batch_size=128"
            collector.problems.append(ConfigError(message, file=COMMAND_LINE))
            continue
        try:
            collector.collect_item(Item(key=key, value=read_value(value_text)), key.strip())
        except ConfigError as error:
            collector.problems.append(ConfigError(error.message, file=COMMAND_LINE, key=key))
    return collector


def merge(lower: Collector, upper: Collector | None = None) -> tuple[dict[str, Setting], list[ConfigError]]:
    """Choose one setting a key. ``upper`` wins over ``lower``; within each, spellings must agree.

    Of overrides that give a key twice by one name the last one counts, as on every command line.
    """
    problems = [*lower.problems, *(upper.problems if upper else [])]
    merged: dict[str, Setting] = {}
    for key, (first, *others) in _group(lower.settings).items():
        merged[key] = first
        for other in others:
            if not agree(first.value, other.value):
                problems.append(_describe_disagreement(first, other))
            elif other.spelled == key:
                merged[key] = other
    for key, (*others, last) in _group(upper.settings if upper else []).items():
        merged[key] = last
        name = last.spelled.rpartition(".")[2]
        for other in others:
            if other.spelled.rpartition(".")[2] != name and not agree(other.value, last.value):
                problems.append(_describe_disagreement(other, last))
    return merged, problems


def _group(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.key, []).append(setting)
    return groups


def agree(a: Any, b: Any) -> bool:
    """Return whether two values are the same; ``true`` is not 1."""
    if isinstance(a, Grid) and isinstance(b, Grid):
        return a.values == b.values
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _describe_disagreement(a: Setting, b: Setting) -> ConfigError:
    said_a, said_b = (s.value if s.argument else s.item.value for s in (a, b))
    where = "" if a.line is None else f" in line {a.line}"
    said = f"{b.spelled} says {show_value(said_b)}, {a.spelled}{where} says {show_value(said_a)}"
    return b.build_error(f"{said}; keep one")


def _holds_grid(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Grid) or any(map(_holds_grid, inside))


def _suggest_mapping(spelled: str, item: Item) -> str | None:
    """Say what to write for a grid, or an entry of a key whose value is a mapping, as ``benchmark.levers.compile``."""
    key, _, name = spelled.rpartition(".")
    if spelled == "grid":
        return "a list at a key makes a grid, as optim.lr: [0.1, 0.2], and fulltilt lab submit --local runs it"
    spelling = resolve_spelling(key)
    if spelling is None or not admits(LEAVES[spelling.keys[0]].hint, dict):
        return None
    value = item.value
    if spelling.keys[0] == "benchmark.levers":
        catalogue = load_catalogue()
        if name not in catalogue:
            return f"no lever named {name}; {format_nearest(name, catalogue)}"
        value = value if isinstance(value, list) else [value]  # of a lever, all values to try
    entry = f"{name}: {format_value(value)}"
    return f"{key} is one value, a mapping, and is given as a whole, which replaces the file's: {key}='{{{entry}}}'"


def show_value(value: Any) -> str:
    """Return a value as messages show it, cut where it is long."""
    plain = to_plain(value)
    plain = list(plain.values) if isinstance(plain, Grid) else plain
    text = format_value(plain) if plain is None or isinstance(plain, bool | ComponentCall) else repr(plain)
    return text if len(text) <= 80 else f"{text[:77]}..."
