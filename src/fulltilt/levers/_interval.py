"""Intervals as levers hold them, "5 epochs" or "100 steps": the configuration's own reader stands above this room."""

from __future__ import annotations

import re
from typing import Annotated, TypeAlias

from annotated_types import DocInfo, Predicate

FORM = "like '5 epochs' or '100 steps'"
_PATTERN = re.compile(r"([1-9]\d*) (step|epoch)s?")


def is_interval(text: str) -> bool:
    return _PATTERN.fullmatch(text) is not None


Interval: TypeAlias = Annotated[str, Predicate(is_interval), DocInfo(FORM)]


def read_interval(text: str) -> tuple[int, str]:
    """``"5 epochs"`` → ``(5, "epoch")``.

    Raises:
        ValueError: it is no interval.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no interval; write one {FORM}")
    return int(match[1]), match[2]
