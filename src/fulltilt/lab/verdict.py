"""Judge the end of an attempt from its exit code, its result file and whether it was asked to stop. Pure."""

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
    """The transition to take, and what is stored of the attempt."""

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
    """Judge how an attempt ended.

    A complete result always counts. If the scheduler stops or was killed, the experiment fails only by an error that
    the training itself reported; otherwise it is queued again.

    Args:
        code: Exit code; None: no scheduler saw the end.
        document: The result file; None: missing or incomplete.
        refusal: Why the process could not be started.
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
    """Read the result file of an attempt; None: missing or incomplete."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _describe_signal(number: int) -> str:
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return f"it was ended by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")
