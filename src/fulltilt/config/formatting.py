"""A value as YAML text, for the rewriting of files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fulltilt.config.reading import read_value
from fulltilt.errors import ConfigError


def format_yaml(value: Any, *, is_flow: bool = False) -> str:
    """A value as YAML, quoted where a plain word would be read as something else."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_yaml(v, is_flow=True) for v in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{format_yaml(k, is_flow=True)}: {format_yaml(v, is_flow=True)}" for k, v in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float):
        return _format_float(value)
    if not isinstance(value, str):
        return str(value)
    return value if _is_plain(value, is_flow=is_flow) else _quote(value)


def _quote(text: str) -> str:
    """Double-quoted YAML. JSON's escapes will not do: it has surrogate pairs, and leaves DEL as it is."""
    return f'"{"".join(_escape(c) for c in text)}"'


def _escape(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    code = ord(character)
    if character.isprintable():
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _format_float(value: float) -> str:
    text = repr(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text)


def _is_plain(text: str, *, is_flow: bool) -> bool:
    if not text.isprintable() or text.strip() != text or (is_flow and re.search(r"[,\[\]{}]", text)):
        return False
    try:
        return read_value(text) == text and read_value(f"{{a: {text}}}" if is_flow else f"a: {text}") is not None
    except ConfigError:
        return False
