"""Flatten nested settings to dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``("data.batch_size", 64)`` of ``{"data": {"batch_size": 64}}``, in order."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
