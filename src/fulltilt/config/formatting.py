"""Format a value as YAML text, for the rewriting of files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fulltilt.config.reading import read_value
from fulltilt.errors import ConfigError


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
