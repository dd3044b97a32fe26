"""What the end of an attempt means: a pure judgement of its exit code, its document and what was wished."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The arrow to take, and what is noted of the attempt."""

    arrow: str
    outcome: str
    reason: str | None = None
    metrics: Mapping[str, float] | None = None


def judge_end(
    code: int | None,
    document: Mapping[str, Any] | None,
    *,
    refusal: str | None = None,
    is_cancelled: bool = False,
    is_stopping: bool = False,
) -> Verdict:
    """Decide what an attempt came to.

    A whole result counts whatever else happened. Where the scheduler stops or was killed, only an error that the
    training itself reported makes an experiment fail; otherwise it waits for its next attempt.

    Args:
        code: None where nobody was there to see it.
        document: What the attempt wrote; None where it wrote nothing whole.
        refusal: Why no process could be started.
    """
    said = document or {}
    error, own_code = said.get("error"), said.get("rc")
    if said.get("reason") == "finished":
        return Verdict(arrow="finish", outcome="succeeded", metrics=said.get("metrics") or {})
    if is_cancelled:
        return Verdict(arrow="end", outcome="cancelled", reason="cancelled")
    if refusal is not None:
        return Verdict(arrow="fail", outcome="refused", reason=refusal)
    if error is not None and own_code not in INTERRUPTED:
        return Verdict(arrow="fail", outcome="user_error", reason=str(error).strip().partition("\n")[0])
    if is_stopping:
        return Verdict(arrow="requeue", outcome="preempted", reason="interrupted")
    if code is None:
        return Verdict(arrow="requeue", outcome="lost", reason="its scheduler was gone")
    if code < 0 or own_code in INTERRUPTED:
        return Verdict(
            arrow="fail", outcome="lost", reason=error or _describe_signal(-code if code < 0 else code - 128)
        )
    return Verdict(arrow="fail", outcome="user_error", reason=f"it ended with {code} and wrote no result")


def read_document(path: Path) -> Mapping[str, Any] | None:
    """What an attempt wrote as JSON; None where that is nothing, or not whole."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _describe_signal(number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"it was ended by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
