"""Turn a tree as the user spelled it into settings by canonical key; all problems are collected, then raised."""

from __future__ import annotations

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
    line: int | None = None
    argument: str | None = None  # of the component call that stands at ``spelled``
    item: Item | None = None

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

    def complain(self, message: str, item: Item, spelled: str) -> None:
        self.problems.append(ConfigError(message, file=self.file, line=item.line, key=spelled))

    def collect(self, branch: Branch, prefix: str = "") -> None:
        for item in branch.items:
            self.collect_item(item, f"{prefix}{item.key}")

    def collect_item(self, item: Item, spelled: str) -> None:
        section = resolve_section(spelled)
        if spelled == CALL_SECTION or spelled.startswith(f"{CALL_SECTION}."):
            self.collect_loader(item, spelled)
        elif section and isinstance(item.value, Branch):
            self.collect(item.value, f"{section}.")
        elif (spelling := resolve_spelling(spelled)) is not None:
            self.collect_leaf(item, spelled, spelling)
        elif section and item.value is not None:
            self.complain(f"is a section and holds keys, not {show_value(item.value)}", item, spelled)
        elif not section:
            remedy = _suggest_mapping(spelled, item) or suggest_names(spelled)
            self.complain(f"unknown key with the value {show_value(item.value)}; {remedy}", item, spelled)

    def collect_leaf(self, item: Item, spelled: str, spelling: Spelling) -> None:
        """Add the setting; a list at a key of a single value is a grid's axis, and so is ``!grid`` anywhere."""
        value = to_plain(item.value)
        if isinstance(value, list) and self.with_grids and not LEAVES[spelling.keys[0]].is_list:
            value = Grid(tuple(value))
        if _holds_grid(value.values if isinstance(value, Grid) else value):
            return self.complain("has a grid inside a value; !grid belongs right behind the key", item, spelled)
        if isinstance(value, Grid) and not value.values:
            return self.complain("is an empty list, so there is no value to run; name one", item, spelled)
        if isinstance(value, Grid):
            value = Grid(tuple(spelling.convert(v) for v in value.values))
        else:
            value = spelling.convert(value)
        for key in spelling.keys:
            self.add(item, spelled, key, value)
        return None

    def add(self, item: Item, spelled: str, key: str, value: Any, argument: str | None = None) -> None:
        place = {"spelled": spelled, "file": self.file, "line": item.line, "item": item}
        self.settings.append(Setting(key=key, value=value, argument=argument, **place))

    def collect_loader(self, item: Item, spelled: str) -> None:
        """Read ``dataloader`` or one of its splits: a component call whose arguments are keys of ``data``."""
        if item.value is None:
            return None
        if isinstance(item.value, Branch) and spelled == CALL_SECTION:
            return self.collect(item.value, f"{CALL_SECTION}.")
        split = spelled.partition(".")[2] or "train"
        if split not in ("train", "val") or not isinstance(item.value, str):
            remedy = "write train: basic(shuffle=true), val: basic()"
            return self.complain(
                f"no loader {split!r} can be made of {show_value(item.value)}; {remedy}", item, spelled
            )
        try:
            call = parse_call(item.value)
        except ConfigError as error:
            return self.complain(error.message, item, spelled)
        if call.name != "basic" or call.args:
            remedy = format_nearest(call.name, ["basic"])
            return self.complain(f"unknown loader {call}; write basic(name=value, …); {remedy}", item, spelled)
        for name, value in call.kwargs.items():
            self.collect_loader_argument(item, spelled, split, name, value)
        return None

    def collect_loader_argument(self, item: Item, spelled: str, split: str, name: str, value: Any) -> None:
        fixed = {"split": split} if split == "train" else {"split": split, "shuffle": False, "drop_last": False}
        if name in fixed:
            if value != fixed[name]:
                message = f"{name}={show_value(value)} in the {split} loader must be {show_value(fixed[name])}"
                self.complain(message, item, spelled)
            return
        key = "data.val_batch_size" if split == "val" and name == "batch_size" else f"data.{name}"
        if key not in LEAVES or name in ("dataset", "path", "val_dataset", "val_batch_size"):
            valid = ["split", *(k.removeprefix("data.") for k in LEAVES if k.startswith("data."))]
            self.complain(f"unknown argument {name}={show_value(value)}; {format_nearest(name, valid)}", item, spelled)
            return
        self.add(item, spelled, key, value, name)


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
    said_a, said_b = (s.value if s.argument or s.item is None else s.item.value for s in (a, b))
    where = "" if a.line is None else f" in line {a.line}"
    said = f"{b.spelled} says {show_value(said_b)}, {a.spelled}{where} says {show_value(said_a)}"
    return b.build_error(f"{said}; keep one")


def _holds_grid(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(v, Grid) or _holds_grid(v) for v in inside)


def _suggest_mapping(spelled: str, item: Item) -> str | None:
    """Say what to write for an entry of a key whose value is a mapping, such as ``benchmark.levers.compile``."""
    key, _, name = spelled.rpartition(".")
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


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raise one error that holds all problems, in the order of the file; nothing where there is none."""
    ordered = sorted({str(p): p for p in problems}.values(), key=lambda p: (p.file == COMMAND_LINE, p.line or 0))
    if len(ordered) == 1:
        raise ordered[0]
    if ordered:
        raise ConfigError("\n".join([f"{len(ordered)} problems:", *(f"  {problem}" for problem in ordered)]))
