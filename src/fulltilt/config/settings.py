"""From a tree as the user spelled it to settings by canonical key. Problems are collected, not raised one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from fulltilt.config.aliases import (
    CALL_SECTION,
    FOREIGN_SECTIONS,
    Spelling,
    resolve_section,
    resolve_spelling,
    suggest_names,
)
from fulltilt.config.calls import format_value, parse_call
from fulltilt.config.hints import admits
from fulltilt.config.leaves import LEAVES, SECTIONS
from fulltilt.config.reading import COMMAND_LINE, Branch, Grid, Item, read_value, to_plain
from fulltilt.errors import ConfigError, format_nearest
from fulltilt.levers import load_catalogue


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One value at one canonical key, and where it was said."""

    key: str
    value: Any  # plain, or a Grid
    spelled: str
    file: str
    line: int | None = None
    argument: str | None = None  # of the component call that stands at ``spelled``
    item: Item | None = None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    @property
    def said(self) -> Any:
        """The value as the user wrote it."""
        return self.value if self.argument or self.item is None else to_plain(self.item.value)

    @property
    def provenance(self) -> str:
        if self.spelled == self.key and not self.argument:
            return self.place
        section, _, bare = self.spelled.rpartition(".")
        name = bare if section in (*SECTIONS, *FOREIGN_SECTIONS) else self.spelled
        return f"alias {name} ({self.place})"


Problem = ConfigError


class Collector:
    """Settings and problems of one file or one set of values."""

    def __init__(self, file: str, *, with_grids: bool = True):
        self.file, self.with_grids = file, with_grids
        self.settings: list[Setting] = []
        self.problems: list[Problem] = []

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
            self.complain(f"is a section and holds keys, not {_show(item.value)}", item, spelled)
        elif not section:
            remedy = _suggest_mapping(spelled, item) or suggest_names(spelled)
            self.complain(f"unknown key with the value {_show(item.value)}; {remedy}", item, spelled)

    def collect_leaf(self, item: Item, spelled: str, spelling: Spelling) -> None:
        plain = to_plain(item.value)
        value = self.as_grid(plain, spelling.keys[0], item, spelled)
        if isinstance(value, Grid):
            value = Grid(tuple(spelling.convert(v) for v in value.values))
        else:
            value = spelling.convert(value)
        for key in spelling.keys:
            self.settings.append(
                Setting(key=key, value=value, spelled=spelled, file=self.file, line=item.line, item=item)
            )

    def as_grid(self, value: Any, key: str, item: Item, spelled: str) -> Any:
        """A list at a key of a single value is an axis; so is ``!grid`` anywhere."""
        if isinstance(value, list) and self.with_grids and not LEAVES[key].is_list:
            value = Grid(tuple(value))
        if _holds_grid(value.values if isinstance(value, Grid) else value):
            self.complain("has a grid inside a value; !grid belongs right behind the key", item, spelled)
            return None
        if isinstance(value, Grid) and not value.values:
            self.complain("is an empty list, so there is no value to run; name one", item, spelled)
            return None
        return value

    def collect_loader(self, item: Item, spelled: str) -> None:
        """``dataloader`` and its splits: a component call whose arguments are keys of ``data``."""
        if item.value is None:
            return None
        if isinstance(item.value, Branch) and spelled == CALL_SECTION:
            return self.collect(item.value, f"{CALL_SECTION}.")
        split = spelled.partition(".")[2] or "train"
        if split not in ("train", "val") or not isinstance(item.value, str):
            remedy = "write train: basic(shuffle=true), val: basic()"
            return self.complain(f"no loader {split!r} can be made of {_show(item.value)}; {remedy}", item, spelled)
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
                self.complain(
                    f"{name}={_show(value)} in the {split} loader must be {_show(fixed[name])}", item, spelled
                )
            return
        key = "data.val_batch_size" if split == "val" and name == "batch_size" else f"data.{name}"
        if key not in LEAVES or name in ("dataset", "path", "val_dataset", "val_batch_size"):
            valid = ["split", *(k.removeprefix("data.") for k in LEAVES if k.startswith("data."))]
            self.complain(f"unknown argument {name}={_show(value)}; {format_nearest(name, valid)}", item, spelled)
            return
        self.settings.append(
            Setting(key=key, value=value, spelled=spelled, file=self.file, line=item.line, argument=name, item=item)
        )


def collect_overrides(overrides: Sequence[str]) -> Collector:
    """``key=value`` words of a command line; the value is read as YAML, the key may be any accepted spelling."""
    collector = Collector(COMMAND_LINE)
    for text in overrides:
        key, equals, value_text = str(text).partition("=")
        if not equals or not key.strip():
            collector.problems.append(
                ConfigError(f"{text!r} is not key=value; write for instance data.batch_size=128", file=COMMAND_LINE)
            )
            continue
        try:
            value = read_value(value_text)
        except ConfigError as error:
            collector.problems.append(ConfigError(error.message, file=COMMAND_LINE, key=key))
            continue
        collector.collect_item(Item(key=key, value=value), key.strip())
    return collector


def merge(lower: Collector, upper: Collector | None = None) -> tuple[dict[str, Setting], list[Problem]]:
    """One setting a key. ``upper`` wins over ``lower``; within each, spellings must agree.

    Overrides that give a key twice by one name: the last one counts, as on every command line.
    """
    problems = [*lower.problems, *(upper.problems if upper else [])]
    merged: dict[str, Setting] = {}
    for key, settings in _group(lower.settings).items():
        merged[key] = settings[0]
        for other in settings[1:]:
            if not agree(settings[0].value, other.value):
                problems.append(_describe_disagreement(settings[0], other))
            elif other.spelled == key:
                merged[key] = other
    for key, settings in _group(upper.settings if upper else []).items():
        merged[key] = settings[-1]
        for other in settings[:-1]:
            if _last_word(other) != _last_word(settings[-1]) and not agree(other.value, settings[-1].value):
                problems.append(_describe_disagreement(other, settings[-1]))
    return merged, problems


def _last_word(setting: Setting) -> str:
    return setting.spelled.rpartition(".")[2]


def _group(settings: Iterable[Setting]) -> dict[str, list[Setting]]:
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.key, []).append(setting)
    return groups


def agree(a: Any, b: Any) -> bool:
    if isinstance(a, Grid) and isinstance(b, Grid):
        return a.values == b.values
    return type(a) is type(b) and a == b if isinstance(a, bool) or isinstance(b, bool) else a == b


def _describe_disagreement(a: Setting, b: Setting) -> Problem:
    where = "" if a.line is None else f" in line {a.line}"
    return ConfigError(
        f"{b.spelled} says {_show(b.said)}, {a.spelled}{where} says {_show(a.said)}; keep one",
        file=b.file,
        line=b.line,
        key=b.key,
    )


def _holds_grid(value: Any) -> bool:
    return any(isinstance(v, Grid) or _holds_grid(v) for v in _iterate(value))


def _iterate(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def _suggest_mapping(spelled: str, item: Item) -> str | None:
    """What to write for an entry of a key whose value is a mapping, such as ``benchmark.levers.compile``; else None."""
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


def _show(value: Any) -> str:
    plain = to_plain(value)
    text = repr(list(plain.values) if isinstance(plain, Grid) else plain)
    return text if len(text) <= 80 else f"{text[:77]}..."


def raise_problems(problems: Sequence[Problem]) -> NoReturn:
    """One error that holds all problems, in the order of the file."""
    ordered = sorted({str(p): p for p in problems}.values(), key=lambda p: (p.file == COMMAND_LINE, p.line or 0))
    if len(ordered) == 1:
        raise ordered[0]
    raise ConfigError("\n".join([f"{len(ordered)} problems:", *(f"  {problem}" for problem in ordered)]))
