"""Write settings into the user's own file: their spelling, their comments, their order; nothing else moves.

The text is edited where the values stand and read again before it is written: the keys asked for must hold their new
values and every other key its old one.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt.config.aliases import FOREIGN_SECTIONS, NOT_BARE, list_bare_names, resolve_spelling
from fulltilt.config.calls import ComponentCall, parse_call
from fulltilt.config.formatting import format_yaml
from fulltilt.config.leaves import LEAVES, SECTIONS
from fulltilt.config.loading import config_from_values, nest
from fulltilt.config.reading import Branch, Grid, Item, read_text, read_tree, read_value
from fulltilt.config.settings import Collector, Setting, raise_problems
from fulltilt.errors import ConfigError, StorageError, format_nearest
from fulltilt.records.run_folder import write_atomic

BOM = "\ufeff"
EARLIER = "earlier comment: "
ANY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Edit:
    start: int
    end: int
    text: str


def write_settings(
    path: str | Path,
    changes: Mapping[str, Any],
    *,
    note: str | None = None,
    replaces: str | None = None,
    mark: str | None = None,
    out: str | Path | None = None,
) -> str:
    """Put ``changes`` (by canonical key) into a copy of the file ``path``, or into itself.

    A key that the file already sets changes where it stands, in the spelling used there; another is added to the
    section it belongs to, with ``note`` as its comment.

    Args:
        replaces: A pattern of notes that earlier calls wrote: a comment that is one and nothing else becomes ``note``,
            so that no old figure stands beside a new value.
        mark: Who changes values. A comment of the user's beside a value that changes, or on the line above it, speaks
            of the old one: ``# for 128`` becomes ``# lr was 0.1, <mark>; earlier comment: for 128``, until the value is
            that again.
        out: The file to write; ``None``: ``path`` itself.

    Returns:
        A unified diff, empty when every key already had its value.

    Raises:
        ConfigError: the file cannot be read, a key or value is not valid, or the file is built in a way (anchors,
            merge keys) that does not let these keys change alone.
        StorageError: it cannot be written; the old file is untouched.
    """
    config_from_values(nest({key: _check_key(key, value) for key, value in changes.items()}), base_dir="")
    old = read_text(path)
    new = old
    for key, value in changes.items():
        new = _write_key(new, str(path), key, value, note, _Marker(mark, replaces) if mark else None)
    if new != old and replaces is not None:
        new = re.sub(rf"(?m)  # {replaces}(?=\r?$)", lambda _: _comment(note), new)
    if new != old:
        _verify(old, new, changes, str(path))
    target = Path(out) if out is not None else Path(path)
    if new != old or target.resolve() != Path(path).resolve():
        check_writable(target)
        has_bom = Path(path).read_bytes().startswith(BOM.encode())
        write_atomic(target.resolve(), (BOM if has_bom else "") + new)
    return _make_diff(old, new, str(path), str(target))


def check_writable(path: str | Path) -> None:
    """Whether a file that is there may be replaced: a rename asks for the folder's permission alone, and root for none.

    Raises:
        StorageError: its mode lets nobody write it, or not this user.
    """
    path = Path(path)
    if path.exists() and not (path.stat().st_mode & ANY_WRITE and os.access(path, os.W_OK)):
        mode = stat.S_IMODE(path.stat().st_mode)
        raise StorageError(f"{path} is not writable (mode {mode:o}); chmod u+w {path}, or name another file")


def _check_key(key: str, value: Any) -> Any:
    if key not in LEAVES:
        raise ConfigError(f"unknown key; {format_nearest(key, LEAVES)}", key=key)
    return list(value) if isinstance(value, tuple) else value


def _make_diff(old: str, new: str, source: str, target: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), source, target, lineterm="")
    return "".join(f"{line}\n" for line in lines)


def _read_settings(text: str, file: str) -> tuple[Branch, list[Setting]]:
    tree = read_tree(text, file=file)
    collector = Collector(file)
    collector.collect(tree)
    if collector.problems:
        raise_problems(collector.problems)
    return tree, collector.settings


def _verify(old: str, new: str, changes: Mapping[str, Any], file: str) -> None:
    """Read both texts and compare: what was asked for has changed and nothing else."""
    before = {(s.key, s.spelled): s.value for s in _read_settings(old, file)[1]}
    try:
        after = {(s.key, s.spelled): s.value for s in _read_settings(new, file)[1]}
    except ConfigError as error:
        values = ", ".join(f"{key}: {format_yaml(value)}" for key, value in changes.items())
        raise ConfigError(f"cannot be rewritten ({error.message}); set by hand: {values}", file=file) from None
    for (key, spelled), value in after.items():
        wanted = changes[key] if key in changes else before.get((key, spelled))
        if _plain(value) != _plain(wanted):
            raise ConfigError(
                f"{spelled} cannot change alone here: it shares its text with another key (an anchor or merge key); "
                f"set {key}: {format_yaml(_plain(wanted))} by hand",
                file=file,
                key=key,
            )
    lost = [spelled for _, spelled in before.keys() - after.keys()]
    if lost:
        raise ConfigError(f"{', '.join(lost)} would be lost; write the values by hand", file=file)


@dataclasses.dataclass(frozen=True, slots=True)
class _Marker:
    """Keeps comments true beside values that change.

    Attributes:
        who: Did it, as the mark says.
        own: A pattern of comments that are no user's.
    """

    who: str
    own: str | None

    def mark(self, text: str, item: Item, edit: _Edit, old: str) -> str:
        """The text with its mark set; or taken away where the value is the one again that the comment was made for."""
        if isinstance(item.value, Branch | list | Grid):
            return text
        at = self._find_comment(text, item, edit)
        if at is None:
            return text
        end = _find_line_end(text, at)
        comment = text[at:end].rstrip() or "  #"
        if self.own and re.fullmatch(rf"# *{self.own}", comment):
            return text
        marks, users = self._split(comment.lstrip())
        if item.key not in marks:
            marks[item.key] = " ".join(old.split()) or "null"
        elif _is_same(marks[item.key], edit.text):
            del marks[item.key]
        else:
            return text
        made = self._join(marks, users)
        if not made:
            return f"{text[:at].rstrip(' ')}{text[end:]}"
        space = comment[: len(comment) - len(comment.lstrip())]
        return f"{text[:at]}{space}{made}{text[end:]}"

    def _split(self, comment: str) -> tuple[dict[str, str], str]:
        """The marks of a comment, key → value, and the user's own comment; empty where it has none."""
        one = re.compile(rf"(\S+) was (.+?), {re.escape(self.who)}(?:; |$)")
        marks: dict[str, str] = {}
        left = comment.removeprefix("# ")
        while made := one.match(left):
            marks[made[1]], left = made[2], left[made.end() :]
        if not marks:
            return {}, "" if comment == "#" else comment
        left = left.removeprefix(EARLIER)
        return marks, left if not left or left.startswith("#") else f"# {left}"

    def _join(self, marks: Mapping[str, str], users: str) -> str:
        if not marks:
            return users
        said = [f"{key} was {was}, {self.who}" for key, was in marks.items()]
        if users:  # one that does not begin as most do keeps its own sign, and is found again as it was
            said.append(EARLIER + (users[2:] if re.match(r"# [^#]", users) else users))
        return f"# {'; '.join(said)}"

    def _find_comment(self, text: str, item: Item, edit: _Edit) -> int | None:
        """Where the comment begins that speaks of the value: between key and value, behind it, or at the end of its
        line a place for one, where the line above is a comment."""
        between = re.compile(r"\s#").search(text, item.key_end, edit.start)
        if between is not None:
            return between.start() + 1
        behind = _find_hash(text, edit.start + len(edit.text))
        if behind is not None:
            return behind
        line_start = text.rfind("\n", 0, item.key_start) + 1
        above = text[:line_start].removesuffix("\n").rpartition("\n")[2].strip()
        if not above.startswith("#"):
            return None
        end = _find_line_end(text, edit.start)
        return len(text[:end].rstrip())


def _is_same(first: str, second: str) -> bool:
    """Whether two texts are the same value: ``1e-3`` and ``0.001`` are."""
    try:
        return read_value(first) == read_value(second)
    except ConfigError:  # of a mark that was edited by hand
        return False


def _find_line_end(text: str, at: int) -> int:
    found = re.compile(r"\r?\n|\Z").search(text, at)
    return found.start() if found else len(text)


def _find_hash(text: str, start: int) -> int | None:
    """Where a comment begins on the rest of the line; a ``#`` in quotes, or inside a word, begins none."""
    quote = ""
    for at in range(start, _find_line_end(text, start)):
        char, before = text[at], text[at - 1]
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in "\"'" and before in " \t,[{:":
            quote = char
        elif char == "#" and before in " \t":
            return at
    return None


def _plain(value: Any) -> Any:
    return list(value.values) if isinstance(value, Grid) else list(value) if isinstance(value, tuple) else value


def _write_key(text: str, file: str, key: str, value: Any, note: str | None, marker: _Marker | None) -> str:
    tree, settings = _read_settings(text, file)
    standing = [s for s in settings if s.key == key]
    if not standing:
        return _add_key(text, tree, key, value, note)
    by_place = {setting.item.start if setting.item else 0: setting for setting in standing}
    # From the back, so that the offsets of those in front stay true.
    for _, setting in sorted(by_place.items(), reverse=True):
        if setting.value != value or isinstance(setting.value, bool) != isinstance(value, bool):
            edit = _change_setting(text, setting, value)
            old = text[setting.item.start : setting.item.end] if setting.item else ""
            text = text[: edit.start] + edit.text + text[edit.end :]
            if marker is not None and setting.item is not None:
                text = marker.mark(text, setting.item, edit, old)
    return text


def _change_setting(text: str, setting: Setting, value: Any) -> _Edit:
    item = setting.item
    if item is None or item.line is None:
        raise ConfigError("has no place in the file", key=setting.key)
    if setting.argument:
        call = parse_call(item.value)
        changed = ComponentCall(call.name, call.args, {**call.kwargs, setting.argument: value})
        return _replace_value(text, item, format_yaml(str(changed), is_flow=item.is_flow))
    return _replace_value(text, item, format_yaml(_in_spelling(setting, value), is_flow=item.is_flow))


def _in_spelling(setting: Setting, value: Any) -> Any:
    """The value as this spelling says it: ``use_amp: false`` for ``precision: fp32``."""
    spelling = resolve_spelling(setting.spelled)
    if spelling is None or len(spelling.keys) > 1:
        raise ConfigError(
            f"{setting.spelled} sets {' and '.join(spelling.keys) if spelling else 'nothing'} together; "
            f"write {setting.key} on a line of its own first",
            file=setting.file,
            line=setting.line,
            key=setting.key,
        )
    for candidate in (True, False, value) if not isinstance(value, bool) else (value,):
        converted = spelling.convert(candidate)
        if converted == value and isinstance(converted, bool) == isinstance(value, bool):
            return candidate
    return value


def _replace_value(text: str, item: Item, rendered: str) -> _Edit:
    if item.start < item.end:
        end = item.start + len(text[item.start : item.end].rstrip())  # a block scalar's ends behind its line break
        between = text[item.key_end : item.start]
        is_below = "\n" in between and "#" not in between  # a comment there stays, and so does the value
        start = text.index(":", item.key_end) + 1 if is_below else item.start
        return _Edit(start=start, end=end, text=f" {rendered}" if is_below else rendered)
    colon = text.index(":", item.key_end) + 1
    return _Edit(start=colon, end=colon, text=f" {rendered}")


def _add_key(text: str, tree: Branch, key: str, value: Any, note: str | None) -> str:
    """Add a key in the section it belongs to; a file without sections gets it flat."""
    section, _, name = key.rpartition(".")
    if tree.is_flow:
        return _add_to_branch(text, tree, key, value, note)
    home = _find_home(tree, key)
    if home is not None:
        return _add_to_branch(text, home, name, value, note)
    outer, _, inner = section.rpartition(".")
    parent = _find_branch(tree, [outer]) if outer else None
    if parent is not None:
        return _add_to_branch(text, parent, inner, {name: value}, note)
    bare = list_bare_names().get(name)
    if not section or (_is_flat(tree) and bare is not None and bare.keys == (key,)):
        return _add_to_branch(text, tree, name, value, note)
    empty = next((item for item in tree.items if item.key == section.partition(".")[0] and not _has_items(item)), None)
    if empty is not None:
        return _fill_section(text, empty, key.partition(".")[2], value, note)
    newline = _newline_of(text)
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(section.split("."))]
    lines.append(f"{'  ' * len(lines)}{name}: {format_yaml(value)}{_comment(note)}")
    body = text if text.endswith(("\n", "\r")) or not text else text + newline
    return body + newline.join(lines) + newline


def _has_items(item: Item) -> bool:
    return isinstance(item.value, Branch) and bool(item.value.items)


def _fill_section(text: str, section: Item, name: str, value: Any, note: str | None) -> str:
    """The first key of ``speed:`` or ``speed: {}``; a name with a dot brings its own section."""
    *parents, last = name.split(".")
    rendered = f"{last}: {format_yaml(value, is_flow=True)}"
    for parent in reversed(parents):
        rendered = f"{parent}: {{{rendered}}}"
    if section.start < section.end and text[section.start] == "{":
        return f"{text[: section.start]}{{{rendered}}}{text[section.end :]}"
    at = text.index(":", section.key_end) + 1
    if section.start < section.end:  # an explicit null
        text = text[:at] + text[section.end :]
    line_end = text.find("\n", at)
    head, tail = (text, "") if line_end < 0 else (text[:line_end].removesuffix("\r"), text[line_end + 1 :])
    newline = _newline_of(text)
    return f"{head}{newline}  {rendered}{_comment(note)}{newline}{tail}"


def _is_flat(tree: Branch) -> bool:
    """Keys at the top, and no section of the kind that would hold them."""
    sections = {*SECTIONS, *FOREIGN_SECTIONS} - NOT_BARE
    names = {item.key for item in tree.items}
    return not names & sections and bool(names & list_bare_names().keys())


def _find_home(tree: Branch, key: str) -> Branch | None:
    """The section the key belongs to, else a foreign section that may hold it."""
    section, _, name = key.rpartition(".")
    if not section:
        return None
    own = _find_branch(tree, section.split("."))
    if own is not None:
        return own
    bare = list_bare_names().get(name)
    if bare is None or bare.keys != (key,):
        return None
    order = FOREIGN_SECTIONS if section != "speed" else reversed(FOREIGN_SECTIONS)
    found = (_find_branch(tree, [foreign]) for foreign in order)
    return next((branch for branch in found if branch is not None), None)


def _find_branch(tree: Branch, path: list[str]) -> Branch | None:
    for item in tree.items:
        if item.key == path[0] and isinstance(item.value, Branch) and item.value.items and item.line is not None:
            return item.value if len(path) == 1 else _find_branch(item.value, path[1:])
    return None


def _add_to_branch(text: str, branch: Branch, name: str, value: Any, note: str | None) -> str:
    last = branch.items[-1]
    if branch.is_flow:
        end = max(last.end, last.key_end)
        return f"{text[:end]}, {name}: {format_yaml(value, is_flow=True)}{text[end:]}"
    line_start = text.rfind("\n", 0, branch.items[0].key_start) + 1
    indent = " " * (branch.items[0].key_start - line_start)
    end = max(last.key_end + 1, last.end if last.start < last.end else 0)
    line_end = text.find("\n", end)
    newline = _newline_of(text)
    line = f"{indent}{name}: {format_yaml(value)}{_comment(note)}"
    if line_end < 0:
        return f"{text}{newline}{line}{newline}"
    return f"{text[: line_end + 1]}{line}{newline}{text[line_end + 1 :]}"


def _comment(note: str | None) -> str:
    return f"  # {' '.join(note.split())}" if note else ""


def _newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
