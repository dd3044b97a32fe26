"""How an interval is written, "5 epochs" or "100 steps", in levers and everywhere else in a configuration."""

import re
from typing import Annotated, TypeAlias

from annotated_types import DocInfo, Predicate

FORM = "like '5 epochs' or '100 steps'"
_PATTERN = re.compile(r"\s*(?=[\d_]*[1-9])(\d+(?:_\d+)*)\s*(step|epoch)s?\s*", re.IGNORECASE)
Interval: TypeAlias = Annotated[str, Predicate(lambda text: _PATTERN.fullmatch(text) is not None), DocInfo(FORM)]


def read_interval(text: str) -> tuple[int, str]:
    """Read ``"5 epochs"`` as ``(5, "epoch")``.

    Raises:
        ValueError: it is no interval of at least one step or epoch.
    """
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no interval; write one {FORM}")
    return int(match[1]), match[2].lower()
