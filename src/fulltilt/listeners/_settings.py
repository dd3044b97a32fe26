"""The settings of a run as other systems show them: one value a dotted name."""

from __future__ import annotations

from typing import Any

from fulltilt.records import RunStarted
from fulltilt.records.settings import flatten_settings


def list_settings(event: RunStarted) -> dict[str, Any]:
    """``data.batch_size``, ``optim.lr`` …; ``plan.precision`` … as they run; facts of the run. Nulls are left out."""
    facts = {"device": event.device, "n_parameters": event.n_parameters, "n_samples": event.n_samples}
    facts |= {"n_epochs": event.n_epochs, "config_digest": event.config_digest}
    named = dict(flatten_settings(event.config)) | {f"plan.{name}": value for name, value in event.plan.items()} | facts
    return {name: value for name, value in named.items() if value is not None}
