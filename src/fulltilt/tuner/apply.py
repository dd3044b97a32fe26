"""Write a pick into the user's own YAML file: comments kept, only what differs touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt.config import Config, load_config, plan_of, write_settings
from fulltilt.levers import load_catalogue
from fulltilt.tuner.result import TuneResult


def plan_changes(result: TuneResult, config: Config) -> dict[str, Any]:
    """Dotted key → value: where ``config`` differs from the recommended plan, and the learning rate if that follows."""
    plan, catalogue = result.picks.recommended.trial.plan, load_catalogue()
    current = plan_of(config)
    changes = {catalogue[name].key: value for name, value in plan.items() if current[name] != value}
    rate = result.learning_rate
    if rate.to is not None and rate.to != rate.start:
        changes["optim.lr"] = float(f"{rate.to:.3g}")
    return changes


def apply_result(result: TuneResult, path: str | Path) -> str:
    """Write the recommended plan into ``path`` and return the unified diff, empty when nothing differs.

    Raises:
        ConfigError: the file cannot be read as a configuration. StorageError: it cannot be written.
    """
    changes = plan_changes(result, load_config(path))
    if not changes:
        return ""
    trial = result.picks.recommended.trial
    note = f"fulltilt tune: {trial.samples_per_s:,.0f} samples/s"
    return write_settings(path, changes, note=note, out=None)
