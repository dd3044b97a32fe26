"""Resolve ``${data.batch_size}``, values that refer to other keys, once a grid is expanded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fulltilt.config.aliases import resolve_spelling, suggest_names
from fulltilt.config.calls import format_value
from fulltilt.config.leaves import LEAVES
from fulltilt.errors import ConfigError

_REFERENCE = re.compile(r"\$\{\s*([^{}]*?)\s*\}")


def resolve_references(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace references; a value that is one reference takes the type of what it refers to.

    Args:
        values: By canonical key; keys that are not there have their default.

    Returns:
        The resolved values, and a message for every key that could not be resolved.
    """
    resolver = _Resolver(values)
    resolved: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for key in values:
        try:
            resolved[key] = resolver.resolve_key(key, ())
        except ConfigError as error:
            problems[key] = error.message
    return resolved, problems


class _Resolver:
    def __init__(self, values: Mapping[str, Any]):
        self.values = values
        self.done: dict[str, Any] = {}

    def resolve_key(self, key: str, path: tuple[str, ...]) -> Any:
        if key in path:
            chain = " → ".join([*path[path.index(key) :], key])
            raise ConfigError(f"refers to itself: {chain}; put a value in one of them")
        if key not in self.done:
            value = self.values[key] if key in self.values else LEAVES[key].default
            self.done[key] = self.resolve_value(value, (*path, key))
        return self.done[key]

    def resolve_value(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, dict):
            return {k: self.resolve_value(v, path) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.resolve_value(v, path) for v in value]
        if not isinstance(value, str):
            return value
        if whole := _REFERENCE.fullmatch(value):
            return self.look_up(whole[1], path)

        def insert(reference: re.Match[str]) -> str:
            found = self.look_up(reference[1], path)
            return found if isinstance(found, str) else format_value(found)

        text = _REFERENCE.sub(insert, value)
        if "${" in text:
            raise ConfigError(f"{value!r} has '${{' without a key and '}}'; write ${{data.batch_size}}")
        return text

    def look_up(self, spelled: str, path: tuple[str, ...]) -> Any:
        spelling = resolve_spelling(spelled)
        if spelling is None:
            raise ConfigError(f"${{{spelled}}} refers to an unknown key; {suggest_names(spelled)}")
        key, *others = spelling.keys
        if others:
            raise ConfigError(f"${{{spelled}}} refers to {' and '.join(spelling.keys)}; name one of them")
        return self.resolve_key(key, path)
