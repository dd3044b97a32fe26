"""Define the states of an experiment and the allowed transitions between them, as one table.

    queued ── lease ──► leased ── start ──► running ── finish ──► finalizing ── commit ──► succeeded
      ▲ │                 │ │                 │ │ │
      │ └─ drop ─┐        │ └─ fail ─► failed ◄┘ │ └─ requeue, back to queued
      │          ▼        └─────── cancel ───────┤
    retry ◄─ cancelled ◄── end ── cancelling ◄───┘

A training that finished before a cancel reached it has succeeded.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrow:
    """Holds one transition: the states that it may leave, and the one that it leads to."""

    sources: tuple[str, ...]
    target: str


OWNED = ("leased", "running", "finalizing", "cancelling")  # an attempt is under way, or its scheduler is gone
OVER = ("succeeded", "failed", "cancelled")
STATES = ("queued", *OWNED, *OVER)

ARROWS: Mapping[str, Arrow] = {
    "lease": Arrow(sources=("queued",), target="leased"),
    "start": Arrow(sources=("leased",), target="running"),
    "finish": Arrow(sources=("leased", "running", "cancelling"), target="finalizing"),
    "commit": Arrow(sources=("finalizing",), target="succeeded"),
    "fail": Arrow(sources=("leased", "running"), target="failed"),
    "requeue": Arrow(sources=("leased", "running"), target="queued"),
    "drop": Arrow(sources=("queued",), target="cancelled"),
    "cancel": Arrow(sources=("leased", "running"), target="cancelling"),
    "end": Arrow(sources=("cancelling",), target="cancelled"),
    "retry": Arrow(sources=("failed", "cancelled"), target="queued"),
}
