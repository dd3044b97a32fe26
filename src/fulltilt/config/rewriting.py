"""Write settings into the user's own file and keep its spelling, comments and order.

The text is edited where the values stand and read again before it is written: the keys asked for must hold their new
values and every other key its old one.
"""

import difflib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulltilt.config.aliases import FOREIGN_SECTIONS, NOT_BARE, list_bare_names, resolve_spelling
from fulltilt.config.calls import ComponentCall, parse_call
from fulltilt.config.leaves import LEAVES, SECTIONS
from fulltilt.config.loading import config_from_values, nest
from fulltilt.config.reading import Branch, Grid, Item, raise_problems, read_text, read_tree, read_value
from fulltilt.config.settings import Collector, Setting, agree
from fulltilt.errors import ConfigError, StorageError, format_nearest
from fulltilt.records.run_folder import write_atomic

BOM = "\ufeff"
ANY_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def write_settings(
    path: str | Path,
    changes: Mapping[str, Any],
    *,
    note: str | None = None,
    replaces: str | None = None,
) -> str:
    """Write ``changes`` (by canonical key) into the file ``path``.

    A key that the file already sets changes where it stands, in the spelling used there; another is added to the
    section it belongs to, with ``note`` as the comment of its line. The user's comments stay.

    Args:
        replaces: A pattern of notes that earlier calls wrote: a comment that is one and nothing else becomes ``note``,
            so that no old figure stands beside a new value.

    Returns:
        A unified diff, empty when every key already had its value.

    Raises:
        ConfigError: the file cannot be read, a key or value is not valid, or the file is built in a way (anchors,
            merge keys) that does not let these keys change alone.
        StorageError: it cannot be written; the old file is untouched.
    """
    for key in changes.keys() - LEAVES.keys():
        raise ConfigError(f"unknown key; {format_nearest(key, LEAVES)}", key=key)
    changes = {key: list(value) if isinstance(value, tuple) else value for key, value in changes.items()}
    config_from_values(nest(changes), base_dir="")
    old = new = read_text(path)
    for key, value in changes.items():
        new = _write_key(new, str(path), key, value, note)
    if new != old and replaces is not None:
        new = re.sub(rf"(?m)  # {replaces}(?=\r?$)", lambda _: _comment(note), new)
    if new != old:
        _verify(old, new, changes, str(path))
        check_writable(path)
        has_bom = Path(path).read_bytes().startswith(BOM.encode())
        write_atomic(Path(path), (BOM if has_bom else "") + new)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), str(path), lineterm="")
    return "".join(f"{line}\n" for line in lines)


def check_writable(path: str | Path) -> None:
    """Raise a StorageError where the file is read-only; replacing it by rename would ignore that."""
    path = Path(path)
    if path.exists() and not (path.stat().st_mode & ANY_WRITE and os.access(path, os.W_OK)):
        mode = stat.S_IMODE(path.stat().st_mode)
        raise StorageError(f"{path} is not writable (mode {mode:o}); chmod u+w {path}, or name another file")


def _read_settings(text: str, file: str) -> tuple[Branch, list[Setting]]:
    tree = read_tree(text, file=file)
    collector = Collector(file)
    collector.collect(tree)
    raise_problems(collector.problems)
    return tree, collector.settings


def _verify(old: str, new: str, changes: Mapping[str, Any], file: str) -> None:
    """Read both texts and check that what was asked for has changed, and nothing else."""
    before = {(s.key, s.spelled): s.value for s in _read_settings(old, file)[1]}
    try:
        after = {(s.key, s.spelled): s.value for s in _read_settings(new, file)[1]}
    except ConfigError as error:
        values = ", ".join(f"{key}: {format_yaml(value)}" for key, value in changes.items())
        raise ConfigError(f"cannot be rewritten ({error.message}); set by hand: {values}", file=file) from None
    for (key, spelled), value in after.items():
        wanted = changes[key] if key in changes else before.get((key, spelled))
        if not agree(value, wanted):
            raise ConfigError(
                f"{spelled} cannot change alone here: it shares its text with another key (an anchor or merge key); "
                f"set {key}: {format_yaml(wanted.values if isinstance(wanted, Grid) else wanted)} by hand",
                file=file,
                key=key,
            )
    lost = [spelled for _, spelled in before.keys() - after.keys()]
    if lost:
        raise ConfigError(f"{', '.join(lost)} would be lost; write the values by hand", file=file)


def _write_key(text: str, file: str, key: str, value: Any, note: str | None) -> str:
    tree, settings = _read_settings(text, file)
    standing = {s.item.start: s for s in settings if s.key == key}
    if not standing:
        return _add_key(text, tree, key, value, note)
    # From the back, so that the offsets of those in front stay true.
    for _, setting in sorted(standing.items(), reverse=True):
        if not agree(setting.value, value):
            rendered = format_yaml(_in_spelling(setting, value), is_flow=setting.item.is_flow)
            text = _replace_value(text, setting.item, rendered)
    return text


def _in_spelling(setting: Setting, value: Any) -> Any:
    """Return the value as this spelling says it: ``use_amp: false`` for ``precision: fp32``."""
    if setting.argument:
        call = parse_call(setting.item.value)
        return str(ComponentCall(call.name, call.args, {**call.kwargs, setting.argument: value}))
    spelling = resolve_spelling(setting.spelled)
    if spelling is None or len(spelling.keys) > 1:
        keys = " and ".join(spelling.keys) if spelling else "nothing"
        message = f"{setting.spelled} sets {keys} together; write {setting.key} on a line of its own first"
        raise setting.build_error(message)
    candidates = (value,) if isinstance(value, bool) else (True, False, value)
    return next((c for c in candidates if agree(spelling.convert(c), value)), value)


def _replace_value(text: str, item: Item, rendered: str) -> str:
    start = end = text.index(":", item.key_end) + 1
    if item.start < item.end:
        end = item.start + len(text[item.start : item.end].rstrip())  # a block scalar's ends behind its line break
        between = text[start : item.start]
        if "\n" not in between or "#" in between:  # a value on a line of its own stays there under a comment
            return f"{text[: item.start]}{rendered}{text[end:]}"
    return f"{text[:start]} {rendered}{text[end:]}"


def _add_key(text: str, tree: Branch, key: str, value: Any, note: str | None) -> str:
    """Add a key in the section it belongs to; a file without sections gets it flat."""
    branch, names = tree, key.split(".")
    while len(names) > 1 and (found := _find_branch(branch, names[0])):
        branch, names = found, names[1:]
    empty = next((item for item in branch.items if len(names) > 1 and item.key == names[0]), None)
    if branch is not tree and empty:
        return _fill_section(text, empty, *_nest(names[1:], value), note)
    if branch is not tree or len(names) == 1:
        return _add_to_branch(text, branch, *_nest(names, value), note)
    if tree.is_flow:
        return _add_to_branch(text, tree, key, value, note)
    bare = list_bare_names().get(names[-1])
    foreign = FOREIGN_SECTIONS[::-1] if names[0] == "speed" else FOREIGN_SECTIONS
    home = next(filter(None, (_find_branch(tree, name) for name in foreign)), tree if _is_flat(tree) else None)
    if home and bare and bare.keys == (key,):
        return _add_to_branch(text, home, names[-1], value, note)
    if empty:
        return _fill_section(text, empty, *_nest(names[1:], value), note)
    body = text if text.endswith(("\n", "\r")) or not text else text + _newline_of(text)
    return _insert_line(f"{body}{names[0]}:", len(body), 2, *_nest(names[1:], value), note)


def _is_flat(tree: Branch) -> bool:
    """Return whether keys stand at the top, and no section of the kind that would hold them."""
    sections = {*SECTIONS, *FOREIGN_SECTIONS} - NOT_BARE
    names = {item.key for item in tree.items}
    return not names & sections and bool(names & list_bare_names().keys())


def _find_branch(tree: Branch, name: str) -> Branch | None:
    """Return the section ``name`` of a mapping where it holds something."""
    found = (item.value for item in tree.items if item.key == name)
    return next((value for value in found if isinstance(value, Branch) and value.items), None)


def _fill_section(text: str, item: Item, name: str, value: Any, note: str | None) -> str:
    """Add the first key of an empty section, ``speed:`` or ``speed: {}``, on a line of its own."""
    if item.is_flow:
        return _replace_value(text, item, format_yaml({name: value}))
    text = text[: item.start].rstrip(" ") + text[item.end :] if item.start < item.end else text
    return _insert_line(text, item.key_end, _read_indent(text, item) + 2, name, value, note)


def _add_to_branch(text: str, branch: Branch, name: str, value: Any, note: str | None) -> str:
    last = branch.items[-1]
    if branch.is_flow:
        end = max(last.end, last.key_end)
        return f"{text[:end]}, {name}: {format_yaml(value, is_flow=True)}{text[end:]}"
    end = max(last.key_end + 1, last.end if last.start < last.end else 0)
    return _insert_line(text, end, _read_indent(text, branch.items[0]), name, value, note)


def _insert_line(text: str, place: int, indent: int, name: str, value: Any, note: str | None) -> str:
    """Insert a key behind the line that ``place`` lies in."""
    line = f"{' ' * indent}{name}: {format_yaml(value)}{_comment(note)}{_newline_of(text)}"
    at = text.find("\n", place) + 1
    return f"{text[:at]}{line}{text[at:]}" if at else f"{text}{_newline_of(text)}{line}"


def _read_indent(text: str, item: Item) -> int:
    return item.key_start - text.rfind("\n", 0, item.key_start) - 1


def _nest(names: list[str], value: Any) -> tuple[str, Any]:
    """Return the first name, and the value under the others: ``transform`` and ``{val: normalize}``."""
    for name in reversed(names[1:]):
        value = {name: value}
    return names[0], value


def _comment(note: str | None) -> str:
    return f"  # {' '.join(note.split())}" if note else ""


def _newline_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def format_yaml(value: Any, *, is_flow: bool = False) -> str:
    """Return a value as YAML, quoted where a plain word would be read as something else."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_yaml(v, is_flow=True) for v in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{format_yaml(k, is_flow=True)}: {format_yaml(v, is_flow=True)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float):
        return re.sub(r"^(-?\d+)e", r"\1.0e", repr(value))
    if not isinstance(value, str) or _is_plain(value, is_flow=is_flow):
        return str(value)
    # JSON's escapes are YAML's, but for what it leaves as it is (DEL) or would write as a surrogate pair.
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)


def _is_plain(text: str, *, is_flow: bool) -> bool:
    if not text.isprintable() or text.strip() != text or (is_flow and re.search(r"[,\[\]{}]", text)):
        return False
    try:
        return read_value(text) == text and read_value(f"{{a: {text}}}" if is_flow else f"a: {text}") is not None
    except ConfigError:
        return False
