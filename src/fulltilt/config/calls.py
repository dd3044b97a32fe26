"""Component calls: ``wideresnet(depth=28, width=2)`` and pipelines ``random_crop(32, padding=4) | normalize``.

Grammar (white space is free)::

    pipeline := call ("|" call)*
    call     := name [ "(" [argument ("," argument)* [","]] ")" ]
    argument := [key "="] value
    value    := call | number | true | false | null | quoted text | word | "[" values "]" | "(" values ")"

A word is everything up to white space or one of ``, ( ) [ ] { } | = " '``, so paths and
``module:object`` need no quotes. Nothing is ever evaluated.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from fulltilt.errors import ConfigError

MAX_DEPTH = 50

_NAME = re.compile(r"[^\W\d][\w.\-]*(?::[^\W\d][\w.\-]*)?")  # of letters of any script, as Python's own names
_KEY = re.compile(r"([^\W\d]\w*)\s*=")
_WORD = re.compile(r"[^\s,()\[\]{}|='\"]+")
_QUOTED = re.compile(r"""(['"])((?:(?!\1)[^\\]|\\.)*)\1""", re.DOTALL)
_INT = re.compile(r"[+-]?\d+(?:_\d+)*")
_FLOAT = re.compile(r"[+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t"}
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "none": None, "None": None}


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentCall:
    """Holds a name and its arguments; values are numbers, text, booleans, None, lists and further calls."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Return the call as text that ``parse_call`` reads back to an equal call."""
        given = [format_value(v) for v in self.args] + [f"{k}={format_value(v)}" for k, v in self.kwargs.items()]
        return f"{self.name}({', '.join(given)})" if given else self.name


def parse_call(text: str) -> ComponentCall:
    """Read one component call, or raise a ConfigError with the column."""
    parser = _Parser(text)
    call = parser.read_call(depth=0)
    parser.expect_end("a pipeline belongs where transforms are" if parser.peek() == "|" else "one call only")
    return call


def parse_pipeline(text: str) -> tuple[ComponentCall, ...]:
    """Read a pipeline, ``a | b(c=1)``, or raise a ConfigError with the column."""
    parser = _Parser(text)
    calls = [parser.read_call(depth=0)]
    while parser.take("|"):
        calls.append(parser.read_call(depth=0))
    parser.expect_end("write '|' between two stages")
    return tuple(calls)


def format_value(value: Any) -> str:
    """Return a value as it is written inside a call."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(v) for v in value)}]"
    if not isinstance(value, str) or (_WORD.fullmatch(value) and isinstance(_type_word(value), str)):
        return str(value)
    return '"' + re.sub(r'[\\"\n\t]', lambda m: "\\" + {"\n": "n", "\t": "t"}.get(m[0], m[0]), value) + '"'


def _type_word(word: str) -> Any:
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    if _INT.fullmatch(word):
        return int(word)
    return float(word.replace("_", "")) if _FLOAT.fullmatch(word) else word


class _Parser:
    """Reads one text by recursive descent; ``at`` is the next unread character."""

    def __init__(self, text: str):
        self.text, self.at = str(text), 0

    def fail(self, expected: str) -> ConfigError:
        found = f"found {self.text[self.at]!r}" if self.at < len(self.text) else "found the end"
        return ConfigError(f"{self.text!r}: expected {expected} at column {self.at + 1}, {found}")

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, mark: str) -> bool:
        if self.peek() != mark:
            return False
        self.at += 1
        return True

    def expect_end(self, hint: str) -> None:
        if self.peek():
            raise self.fail(f"nothing more ({hint})")

    def separate(self, closing: str) -> None:
        if self.peek() != closing and not self.take(","):
            raise self.fail(f"',' or {closing!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.peek()
        found = pattern.match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def read_call(self, depth: int) -> ComponentCall:
        if depth > MAX_DEPTH:
            raise self.fail(f"at most {MAX_DEPTH} calls inside each other")
        name = self.match(_NAME)
        if name is None:
            raise self.fail("a component name")
        if self.take(":"):
            raise self.fail(f"an object's name, {name[0]}:NAME,")
        args, kwargs = self.read_arguments(depth) if self.take("(") else ((), {})
        return ComponentCall(name[0], args, kwargs)

    def read_arguments(self, depth: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while not self.take(")"):
            self.peek()
            start, key = self.at, self.match(_KEY)
            if key and key[1] in kwargs:
                self.at = start
                raise self.fail(f"each argument once, {key[1]} is given twice")
            if key:
                kwargs[key[1]] = self.read_value(depth + 1)
            elif kwargs:
                raise self.fail("name=value: an argument without a name cannot follow one with a name")
            else:
                args.append(self.read_value(depth + 1))
            self.separate(")")
        return tuple(args), kwargs

    def read_value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.fail(f"at most {MAX_DEPTH} values inside each other")
        for opening, closing in ("[]", "()"):
            if self.take(opening):
                return self.read_list(closing, depth)
        quoted = self.match(_QUOTED)
        if quoted:
            return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), quoted[2], flags=re.DOTALL)
        start, word = self.at, self.match(_WORD)
        if word is None:
            raise self.fail("a value")
        if self.peek() == "(":
            self.at = start
            return self.read_call(depth)
        return _type_word(word[0])

    def read_list(self, closing: str, depth: int) -> list[Any]:
        values = []
        while not self.take(closing):
            values.append(self.read_value(depth + 1))
            self.separate(closing)
        return values
