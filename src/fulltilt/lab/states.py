"""Define the states of an experiment and the allowed transitions between them, as one table.

    queued ── lease ──► leased ── start ──► running ── finish ──► finalizing ── commit ──► succeeded
     ▲ ▲ │                │                   │ │                      │
     │ │ └─ drop ─┐       ├── back_off ───────┤ └─ fail ─► failed ◄────┘ spoil
     │ │          ▼       ▼                   │              │
     │ retry ─ cancelled  backoff ── wake, back to queued    └─ retry, back to queued
     │            ▲ end                       │
     │            └────── cancelling ◄────────┘ cancel, pause
     release ─ held ◄─ park ──┘

A training that finished before a cancel reached it has succeeded.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """Holds one transition: from which states, to which one, and the wish it leaves behind.

    Attributes:
        wish: What somebody wants of a running attempt, ``cancel`` or ``pause``; None takes an earlier wish back.
    """

    sources: tuple[str, ...]
    target: str
    wish: str | None = None


LIVE = ("leased", "running", "cancelling")  # an attempt may be running
OWNED = (*LIVE, "finalizing")  # an attempt is under way, or nobody has settled it
WAITING = ("queued", "backoff", "held")
OVER = ("succeeded", "failed", "cancelled")
STATES = (*WAITING, *OWNED, *OVER)

ARROWS: Mapping[str, Arrow] = {
    "lease": Arrow(sources=("queued",), target="leased"),
    "start": Arrow(sources=("leased",), target="running"),
    "finish": Arrow(sources=LIVE, target="finalizing"),
    "commit": Arrow(sources=("finalizing",), target="succeeded"),
    "spoil": Arrow(sources=("finalizing",), target="failed"),
    "fail": Arrow(sources=("leased", "running"), target="failed"),
    "requeue": Arrow(sources=("leased", "running"), target="queued"),
    "back_off": Arrow(sources=("leased", "running"), target="backoff"),
    "wake": Arrow(sources=("backoff",), target="queued"),
    "give_up": Arrow(sources=("leased", "running"), target="held"),
    "cancel": Arrow(sources=LIVE, target="cancelling", wish="cancel"),
    "pause": Arrow(sources=("leased", "running"), target="cancelling", wish="pause"),
    "end": Arrow(sources=("cancelling",), target="cancelled"),
    "park": Arrow(sources=("cancelling",), target="held"),
    "drop": Arrow(sources=WAITING, target="cancelled"),
    "hold": Arrow(sources=("queued", "backoff"), target="held"),
    "release": Arrow(sources=("held",), target="queued"),
    "retry": Arrow(sources=("failed", "cancelled"), target="queued"),
}
