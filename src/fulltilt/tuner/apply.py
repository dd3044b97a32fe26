"""Write a pick into the user's own YAML file: comments kept, only what differs touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fulltilt.config import Config, load_config, plan_of, write_settings
from fulltilt.levers import compute_plan_digest, load_catalogue
from fulltilt.tuner.options import count_ranks
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


def build_promise(result: TuneResult) -> dict[str, Any] | None:
    """What ``train`` holds a run of the recommended plan against: the row's interval, widened to its runs side by side.

    None where the row has no interval, or the plan ran once: one run says nothing of how much the next differs.
    """
    pick = result.picks.recommended
    trial = pick.trial
    if trial.samples_per_s_ci95 is None or len(pick.runs_samples_per_s) < 2:
        return None
    rates = [*trial.samples_per_s_ci95, *pick.runs_samples_per_s]
    promise: dict[str, Any] = {
        "samples_per_s": [float(f"{min(rates):.5g}"), float(f"{max(rates):.5g}")],
        "plan": compute_plan_digest(trial.plan),
        "machine": result.machine.hostname_hash,
    }
    if trial.n_devices > 1:
        promise["n_ranks"] = trial.n_devices
    if isinstance(trial.observed.get("threads"), int):
        promise["threads"] = trial.observed["threads"]
    phases = trial.phases_ms
    if phases is not None and phases.data_wait is not None and phases.step:
        promise["data_wait_pct"] = round(100 * phases.data_wait / phases.step, 1)
    return promise


def apply_result(result: TuneResult, path: str | Path) -> str:
    """Write the recommended plan into ``path`` and return the unified diff, empty when nothing differs.

    A file that trains in another number of processes than the search measured gets no promise.

    Raises:
        ConfigError: the file cannot be read as a configuration. StorageError: it cannot be written.
    """
    config = load_config(path)
    changes = plan_changes(result, config)
    trial = result.picks.recommended.trial
    promise = build_promise(result) if count_ranks(config) == trial.n_devices else None
    if promise is not None:
        changes["run.promise"] = promise
    if not changes:
        return ""
    note = f"fulltilt tune: {trial.samples_per_s:,.0f} samples/s"
    return write_settings(path, changes, note=note, out=None)
