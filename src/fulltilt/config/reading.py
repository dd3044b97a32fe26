"""Parse YAML safely into a tree with line and offsets of every key; ``!grid`` is the only custom tag."""

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from fulltilt.config.calls import format_value
from fulltilt.errors import ConfigError

MAX_FILE_BYTES = 2**20
MAX_VALUES = 100_000  # anchors can multiply a small file without end
MAX_DEPTH = 40
MAX_INT_BITS = 1023  # beyond, it is no float, and Python refuses to write it down
GRID_TAG = "!grid"
COMMAND_LINE = "command line"
_PREFIX = "tag:yaml.org,2002:"
_AS_TEXT = (f"{_PREFIX}str", f"{_PREFIX}timestamp", f"{_PREFIX}value", f"{_PREFIX}merge")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Grid:
    """Holds the values of one grid axis, written as a ``!grid`` list or a list at a single-value key.

    One object is one axis, however many keys it sets.
    """

    values: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Holds one key of a mapping and its value, with the offsets of both in the text."""

    key: str
    value: Any  # a scalar, a list, a Grid, or a Branch
    line: int | None = None
    key_start: int = 0
    key_end: int = 0
    start: int = 0
    end: int = 0
    is_flow: bool = False  # stands inside { } or [ ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """Holds a mapping; ``items`` in the order of the file."""

    items: tuple[Item, ...] = ()
    is_flow: bool = False


def read_text(path: str | Path) -> str:
    """Return the text of a configuration file, line ends as they are, or raise a ConfigError."""
    file, line = Path(path), None
    try:
        with file.open("rb") as stream:  # a device such as /dev/zero has no size, and no end
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"is larger than {MAX_FILE_BYTES // 2**20} MiB; is it a data file?", file=str(path))
        return content.decode("utf-8-sig")
    except IsADirectoryError:
        message = f"is a folder; name a file in it{_suggest(file / 'config.yaml')}"
    except FileNotFoundError:
        message = f"no such file{_suggest(file)}"
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8"
    raise ConfigError(message, file=str(path), line=line)


def _suggest(file: Path) -> str:
    if str(file).isidentifier() and Path(f"{file}.py").is_file():
        return f"; {file}.py is code: name an object in it, {file}:NAME"
    try:
        names = sorted(p.name for p in file.parent.iterdir() if p.suffix in (".yaml", ".yml"))
    except OSError:
        return f"; the folder {file.parent} is not there either"
    near = difflib.get_close_matches(file.name, names, n=3, cutoff=0.5) or names[:3]
    return f"; in that folder: {', '.join(near)}" if near else ""


def raise_problems(problems: Sequence[ConfigError]) -> None:
    """Raise one error that holds all problems, in the order of the file; nothing where there is none."""
    ordered = sorted({str(p): p for p in problems}.values(), key=lambda p: (p.file == COMMAND_LINE, p.line or 0))
    if len(ordered) == 1:
        raise ordered[0]
    if ordered:
        message = "\n".join([f"{len(ordered)} problems:", *(f"  {problem}" for problem in ordered)])
        raise ConfigError(message, problems=ordered)


def read_tree(text: str, *, file: str) -> Branch:
    """Parse YAML 1.2 whose root is a mapping, or raise a ConfigError with the line."""
    node = _compose(text, file)
    if node is None:
        raise ConfigError("is empty; a configuration names at least a dataset and a model", file=file)
    value = _Reader(file).read_all(node)
    if not isinstance(value, Branch):
        found = "a list" if isinstance(value, list | Grid) else f"the single value {value!r}"
        raise ConfigError(f"holds {found}, expected 'key: value' lines", file=file, line=_line_of(node))
    return value


def read_value(text: str) -> Any:
    """Read one value as YAML writes it: ``1e-4``, ``[64, 128]``, ``sgd(lr=0.1, momentum=0.9)``."""
    node = _compose(text, COMMAND_LINE)
    return None if node is None else _Reader(COMMAND_LINE).read_all(node)


def build_branch(values: Mapping[str, Any]) -> Branch:
    """Build a Branch from nested dicts; its items have no line numbers or offsets."""
    items = {str(key): build_branch(v) if isinstance(v, Mapping) else v for key, v in values.items()}
    return Branch(items=tuple(Item(key=key, value=value) for key, value in items.items()))


def to_plain(value: Any) -> Any:
    """Turn branches back into dicts, everywhere inside ``value``."""
    if isinstance(value, Branch):
        return {item.key: to_plain(item.value) for item in value.items}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


def _compose(text: str, file: str) -> Node | None:
    try:
        return YAML(typ="safe", pure=True).compose(text)
    except RecursionError:
        raise ConfigError(f"is nested deeper than {MAX_DEPTH} levels", file=file) from None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = min(mark.line + 1, max(1, len(text.splitlines()))) if mark else None  # the end of a file is its last
        raise ConfigError(_explain(error), file=file, line=line) from None
    except YAMLError as error:
        at = getattr(error, "position", None)
        line = text.count("\n", 0, at) + 1 if isinstance(at, int) else None
        raise ConfigError(f"is not YAML: {str(error).splitlines()[0]}", file=file, line=line) from None


def _explain(error: MarkedYAMLError) -> str:
    problem = f"{error.problem}"
    if "'\\t'" in problem:
        return "a tab stands where YAML allows only spaces; indent with spaces"
    if "another document" in problem:
        return "holds a second document after '---'; keep one per file"
    context = f" ({error.context})" if error.context else ""
    quotes = "; put quotes around a component call or a ${reference} inside { } or [ ]" if "flow" in context else ""
    return f"is not YAML: {problem}{context}{quotes}"


def _line_of(node: Node) -> int:
    return node.start_mark.line + 1


class _Reader:
    """Turns nodes into values, and counts them."""

    def __init__(self, file: str):
        self.file, self.n_values, self.problems = file, 0, list[ConfigError]()
        self.constructor = YAML(typ="safe", pure=True).constructor

    def fail(self, message: str, node: Node) -> ConfigError:
        return ConfigError(message, file=self.file, line=_line_of(node))

    def read_all(self, node: Node) -> Any:
        value = self.read(node, depth=0, in_flow=False)
        raise_problems(self.problems)
        return value

    def count(self, node: Node, depth: int) -> None:
        self.n_values += 1
        if self.n_values > MAX_VALUES or depth > MAX_DEPTH:
            raise self.fail(f"more than {MAX_VALUES} values or {MAX_DEPTH} levels (an anchor inside itself?)", node)

    def read(self, node: Node, *, depth: int, in_flow: bool) -> Any:
        self.count(node, depth)
        tag = str(node.tag)
        if isinstance(node, SequenceNode) and tag in (f"{_PREFIX}seq", GRID_TAG):
            values = _rejoin_calls([self.read(n, depth=depth + 1, in_flow=True) for n in node.value])
            return Grid(tuple(to_plain(v) for v in values)) if tag == GRID_TAG else values
        if isinstance(node, MappingNode) and tag == f"{_PREFIX}map":
            is_flow = in_flow or bool(node.flow_style)
            items = tuple(self.read_items(node, depth=depth, is_flow=is_flow))
            return Branch(items=items, is_flow=is_flow)
        if isinstance(node, ScalarNode) and tag in _AS_TEXT:
            return node.value
        kind = tag.removeprefix(_PREFIX)
        if not isinstance(node, ScalarNode) or kind not in ("int", "float", "bool", "null"):
            raise self.fail(f"unknown tag {tag.replace(_PREFIX, '!!')}; the only tag is !grid, before a list", node)
        try:
            value = self.constructor.construct_object(node)
        except (ValueError, KeyError, YAMLError):
            digits = f": {len(node.value)} characters; write a smaller one" if len(node.value) > 40 else ""
            raise self.fail(f"{node.value[:40]!r} is not {kind}{digits}", node) from None
        if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise self.fail(f"{node.value[:40]}… is a number of {value.bit_length()} bits; write a smaller one", node)
        return value

    def read_items(self, node: MappingNode, *, depth: int, is_flow: bool) -> Iterator[Item]:
        first: dict[str, tuple[Node, Node]] = {}
        for key_node, value_node, is_merged in self.expand_merges(node):
            if not isinstance(key_node, ScalarNode):
                raise self.fail("a key must be a single word", key_node)
            key = str(key_node.value)
            if key not in first:
                first[key] = key_node, value_node
            elif not is_merged:
                lines = f"here and in line {_line_of(first[key][0])}"
                self.problems.append(self.fail(f"key {key!r} stands {lines}; keep one", key_node))
        yield from _rejoin_items([self.read_item(*pair, depth, is_flow) for pair in first.values()])

    def expand_merges(self, node: MappingNode, depth: int = 0) -> Iterator[tuple[Node, Node, bool]]:
        """Yield a mapping's own pairs first, then those of ``<<``, each with whether it was merged."""
        self.count(node, depth)
        merged: list[MappingNode] = []
        for key, value in node.value:
            sources = value.value if isinstance(value, SequenceNode) else [value]
            if str(key.value) == "<<" and all(isinstance(source, MappingNode) for source in sources):
                merged.extend(sources)
            else:
                yield key, value, depth > 0
        for source in merged:
            yield from ((k, v, True) for k, v, _ in self.expand_merges(source, depth + 1))

    def read_item(self, key: Node, value: Node, depth: int, is_flow: bool) -> Item:
        return Item(
            key=str(key.value),
            value=self.read(value, depth=depth + 1, in_flow=is_flow),
            line=_line_of(key),
            key_start=key.start_mark.index,
            key_end=key.end_mark.index,
            start=value.start_mark.index,
            end=_find_end(value),
            is_flow=is_flow,
        )


def _find_end(node: Node) -> int:
    """Find where the text of a node ends: a block collection's own mark lies after the comments that follow it."""
    if not isinstance(node, SequenceNode | MappingNode) or not node.value or node.flow_style:
        return node.end_mark.index
    last = node.value[-1]
    return _find_end(last[-1] if isinstance(last, tuple) else last)


def _is_open(value: Any) -> bool:
    return isinstance(value, str) and "(" in value and value.count("(") > value.count(")")


def _rejoin_calls(values: list[Any]) -> list[Any]:
    """Join ``[sgd(lr=0.1, momentum=0.9), adam]`` again: YAML ends a plain value at a comma, also inside parentheses."""
    joined: list[Any] = []
    for value in values:
        if joined and _is_open(joined[-1]) and not isinstance(value, list | Grid | Branch):
            written = format_value(value) if value is None or isinstance(value, bool) else str(value)
            joined[-1] = f"{joined[-1]}, {written}"
        else:
            joined.append(value)
    return joined


def _rejoin_items(items: list[Item]) -> list[Item]:
    """Do the same for ``{train: basic(split=train, shuffle=true)}``, whose tail YAML reads as keys without values."""
    joined: list[Item] = []
    for item in items:
        if joined and item.is_flow and _is_open(joined[-1].value) and item.value is None:
            last = joined[-1]
            joined[-1] = dataclasses.replace(last, value=f"{last.value}, {item.key}", end=item.key_end)
        else:
            joined.append(item)
    return joined
