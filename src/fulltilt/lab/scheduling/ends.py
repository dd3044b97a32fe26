"""Judge the end of a training from its exit code, its result file and what was asked of it. Pure."""

import dataclasses
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
MOST_REASON = 2000  # characters


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How an attempt ended.

    Attributes:
        outcome: succeeded, user_error, oom, lost, preempted, infra_refused.
    """

    outcome: str
    reason: str | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=dict)


def judge_end(code: int | None, document: Mapping[str, Any] | None, *, is_stopped: bool = False) -> End:
    """Judge how a training ended. A complete result always counts.

    Args:
        code: Exit code, negative for a signal; None: nobody saw the end.
        document: The result file; None: missing or incomplete.
        is_stopped: It was asked to save and stop.
    """
    said = document or {}
    error, own_code = said.get("error"), said.get("rc")
    if said.get("reason") == "finished":
        return End(outcome="succeeded", metrics=said.get("metrics") or {})
    if error is not None and own_code not in INTERRUPTED:
        reason = str(error).strip().partition("\n")[0][:MOST_REASON]
        outcomes = {"out of memory": "oom", "no space left": "infra_refused"}
        outcome = next((outcome for words, outcome in outcomes.items() if words in reason.lower()), "user_error")
        return End(outcome=outcome, reason=reason)
    if is_stopped:
        return End(outcome="preempted", reason="interrupted")
    if code is None:
        return End(outcome="lost", reason="nobody saw its end")
    if code < 0 or own_code in INTERRUPTED:
        return End(outcome="lost", reason=error or _describe_signal(-code if code < 0 else code - 128))
    return End(outcome="user_error", reason=f"it ended with {code} and wrote no result")


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
