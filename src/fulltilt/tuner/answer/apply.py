"""Write a pick into a YAML file of the user's: comments stay, and only what the search varied and what differs changes.

The file need not be the one that was searched with, so everything follows the file: the learning rate is scaled from
its own, the effective batch stays its own unless the search was free to change it, and what the search never varied
stays as it is there. A file that then holds another plan than the one that was measured gets no promise.
"""

import contextlib
import dataclasses
import math
import os
from pathlib import Path
from typing import Any

from fulltilt.config import ComponentCall, Config, check_writable, load_config, parse_call, plan_of, write_settings
from fulltilt.errors import NoPlanError, UsageError
from fulltilt.levers import BATCH, compute_plan_digest, load_catalogue
from fulltilt.records import PROBES, Plan, encode
from fulltilt.records.promise import Promise, read_promise, write_promise
from fulltilt.report.gain import say_speedup
from fulltilt.tuner.answer.picks import Pick
from fulltilt.tuner.answer.result import TuneResult
from fulltilt.tuner.picks.changes import plan_learning_rate
from fulltilt.tuner.question.data_stamp import PATH_NAMES
from fulltilt.tuner.question.options import count_ranks

MEASURED_ON = {"device": "device_name", "model": "model", "n_parameters": "n_parameters", "data": "data"}
"""Key of a promise → what the probe of the workload calls it."""
OWN_COMMENT = r"fulltilt tune(?:: [\d,.e+-]+ (?:× \([^)]*\)(?:, not proven)?|samples/s(?:, on a busy machine)?))?"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What a configuration needs to hold a recommended plan.

    Attributes:
        values: Dotted key → value.
        plan: What the configuration then holds.
        notes: What stays otherwise than it was measured, and why.
    """

    values: dict[str, Any]
    plan: Plan
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What became of the file: a unified diff, empty when nothing differs, and what the user should know."""

    diff: str
    notes: tuple[str, ...] = ()


def plan_changes(result: TuneResult, config: Config, pick: Pick, *, searched: Config) -> Changes:
    """Plan where ``config`` is to change so that it holds a picked plan and its learning rate.

    Args:
        searched: The configuration that the search was about; it may be ``config`` itself.
    """
    measured, catalogue = pick.trial.plan, load_catalogue()
    current, alike = plan_of(config), plan_of(searched)
    # A value that both configurations spell alike is the measured one, though a search resolves it (precision auto).
    plan = current.replace(**{name: measured[name] for name in measured if current[name] == alike[name]})
    varied = find_varied_levers(result)
    batch, notes = _plan_batch(result, measured, current) if varied & set(BATCH) else (current, [])
    plan = plan.replace(**{name: measured[name] for name in varied}).replace(**{name: batch[name] for name in BATCH})
    # What the search left as it was stays as it is spelled: use_amp true is not narrowed to what it came to here.
    kept = {name for name in varied if measured[name] == result.user_plan[name] and current[name] == alike[name]}
    changed = [name for name in catalogue if name in (varied - kept) | set(BATCH) and current[name] != plan[name]]
    rate, rate_notes = _plan_rate(result, config, searched, plan)
    notes += rate_notes
    others = [
        f"{name} {plan[name]} (measured with {measured[name]})" for name in measured if plan[name] != measured[name]
    ]
    if others:
        notes.append(f"it holds another plan than the one measured, and so no run.promise: {', '.join(others)}")
    values = {catalogue[name].key: plan[name] for name in changed}
    return Changes(values=values | rate, plan=plan, notes=tuple(notes))


def find_varied_levers(result: TuneResult) -> set[str]:
    """Find the levers of which the search ran more than one value, the user's own included."""
    plans: dict[str, list[Plan]] = {"whole": [result.user_plan]}
    for row in (*result.trials, *result.repeats, *result.probes):
        if row.status != "skipped":  # a probe runs without the loader's levers: only others of its kind compare
            plans.setdefault(row.kind if row.kind in PROBES else "whole", []).append(row.plan)
    return {name for found in plans.values() for name in result.user_plan if len({p[name] for p in found}) > 1}


def _plan_batch(result: TuneResult, measured: Plan, current: Plan) -> tuple[Plan, list[str]]:
    """Take the measured batch; while the effective batch was to stay, that of ``current`` stays."""
    if _is_batch_free(result):
        return measured, []
    batch_size, effective = measured["batch_size"], current.effective_batch_size
    if effective % batch_size == 0:
        return current.replace(batch_size=batch_size, accumulate=effective // batch_size), []
    return current, [
        f"its effective batch of {effective} is no multiple of the recommended batch_size {batch_size}: batch_size "
        f"and accumulate stay as they are (--free-batch lets a search change the effective batch)"
    ]


def _is_batch_free(result: TuneResult) -> bool:
    """Whether the search could change the effective batch: by --free-batch, or by batch sizes that were named."""
    own = result.user_plan.effective_batch_size
    return result.learning_rate.rule != "none" or any(row.plan.effective_batch_size != own for row in result.trials)


def _plan_rate(result: TuneResult, config: Config, searched: Config, plan: Plan) -> tuple[dict[str, Any], list[str]]:
    """Scale the rate from the configuration's own pair of rate and batch → its key and value, and notes.

    A file that holds the plan already keeps its rate.
    """
    (key, rate), own = _find_rate(config), plan_of(config)
    rule, is_free = result.learning_rate.rule, _is_batch_free(result)
    scaled = plan_learning_rate(rate, user_plan=own, plan=plan, rule=rule, is_batch_free=is_free)
    if scaled.to is None or scaled.to == rate:
        return {}, []
    started = result.learning_rate.start
    if started is None or not math.isclose(started, _find_rate(searched)[1], rel_tol=1e-6):
        return {}, [
            f"the learning rate is set by code, not by the file: scale it × {scaled.to / rate:.4g} there "
            f"({scaled.rule} rule, effective batch {own.effective_batch_size} → {plan.effective_batch_size})"
        ]
    to = float(f"{scaled.to:.9g}")
    if key == "optim.lr":
        return {key: to}, []
    call = parse_call(config.optim.optimizer if key == "optim.optimizer" else config.task)
    return {key: str(ComponentCall(call.name, call.args, {**call.kwargs, "lr": to}))}, []


def _find_rate(config: Config) -> tuple[str, float]:
    """Find the key of the rate in force: an argument of the task or the optimizer wins over ``optim.lr``."""
    for key, text in (("task", config.task), ("optim.optimizer", config.optim.optimizer)):
        rate = parse_call(text).kwargs.get("lr")
        if isinstance(rate, int | float):
            return key, float(rate)
    return "optim.lr", config.optim.lr


def build_promise(result: TuneResult, pick: Pick) -> Promise | None:
    """Build what ``train`` holds a run of the plan against: its speeds in turns, and the interval of its whole run.

    None where the plan took turns in less than two groups: one process says nothing of how much the next differs.
    """
    trial, phases = pick.trial, pick.trial.phases_ms
    turns = [row for row in result.repeats if row.plan == trial.plan and row.samples_per_s]
    if len(turns) < 2:
        return None
    rates = [*(trial.samples_per_s_ci95 or ()), *(row.samples_per_s or 0.0 for row in turns)]
    threads, data_wait_pct = trial.observed.get("threads"), None
    if phases is not None and phases.data_wait is not None and phases.step:
        data_wait_pct = round(100 * phases.data_wait / phases.step, 1)
    return Promise(
        samples_per_s=(float(f"{min(rates):.5g}"), float(f"{max(rates):.5g}")),
        plan=compute_plan_digest(trial.plan),
        machine=result.machine.hostname_hash,
        **{name: result.workload.get(key) for name, key in MEASURED_ON.items()},
        n_ranks=trial.n_devices,
        threads=threads if isinstance(threads, int) else None,
        cpu_pressure_pct=round(trial.cpu_pressure_pct or 0.0, 1) if trial.is_busy else None,
        data_wait_pct=data_wait_pct,
    )


def check_target(path: str | Path, *, searched: Config) -> Config:
    """Load the configuration of a file that a search of ``searched`` may be written into.

    What a configuration leaves at its default is not compared, nor is where the data lie: a search on a copy of them
    is as good.

    Raises:
        UsageError: it trains another model, other data or another task. ConfigError: it cannot be read as a
            configuration. StorageError: it cannot be written.
    """
    config = load_config(path)
    pairs = {name: (_read_own(config, name), _read_own(searched, name)) for name in ("task", "model", "data.dataset")}
    others = [
        f"{name} {mine} (searched: {theirs})"
        for name, (mine, theirs) in pairs.items()
        if mine is not None and theirs is not None and mine != theirs
    ]
    if others:
        raise UsageError(
            f"{path} is of another workload than the one searched: {', '.join(others)}; search it by itself: "
            f"fulltilt tune {path} --apply {path}"
        )
    check_writable(path)
    return config


def _read_own(config: Config, name: str) -> str | None:
    """Read what the configuration itself says of a part of the workload, as far as that tells it from another one."""
    text = {"task": config.task, "model": config.model, "data.dataset": config.data.dataset}[name]
    if text is None or config.provenance.get(name, "default") == "default":
        return None
    call = parse_call(text)
    if name == "task":  # its arguments hold rates and schedules, which a file has of its own
        return call.name
    args, kwargs = call.args, dict(sorted(call.kwargs.items()))
    if name == "data.dataset":
        args = tuple(value for value in args if not _is_place(value, config.base_dir))
        kwargs = {k: v for k, v in kwargs.items() if k not in PATH_NAMES and not _is_place(v, config.base_dir)}
    return str(ComponentCall(call.name, args, kwargs))


def _is_place(value: object, base_dir: str) -> bool:
    """Whether an argument says where data lie, and not which of them: ``raw/input`` is a name inside a file."""
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_place(part, base_dir) for part in value)
    if not isinstance(value, str):
        return False
    if value.startswith(("/", "./", "../", "~")) or any(map(str.isalpha, Path(value).suffix)):
        return True
    with contextlib.suppress(OSError, ValueError):  # a text too long to be a path, or with a zero in it
        return (Path(base_dir) / value).exists()
    return False


def apply_result(result: TuneResult, path: str | Path, *, pick: Pick, searched: Config) -> Applied:
    """Write a picked plan into the file ``path``, and its promise into the folder of the search.

    A file that trains in another number of processes than the search measured gets no promise. A promise of an earlier
    search that is of another plan than the file's goes.

    Args:
        searched: The configuration that the search was about.

    Raises:
        ConfigError: the file cannot be read as a configuration. StorageError: it cannot be written.
        UsageError: it is of another workload.
        NoPlanError: the settings as they were did not run, so that nothing says that these are better.
    """
    config = check_target(path, searched=searched)
    planned = plan_changes(result, config, pick, searched=searched)
    if result.baseline is None and planned.values:
        raise NoPlanError(
            f"{path} was left as it was: the settings as they were did not run in this search, so nothing is known of "
            f"how {pick.trial.id} compares with them; run the same command again, or with a larger --budget: its rows "
            "are kept"
        )
    changes, notes, note = dict(planned.values), planned.notes, "fulltilt tune"
    is_measured = planned.plan == pick.trial.plan and count_ranks(config) == pick.trial.n_devices
    promise = build_promise(result, pick) if is_measured else None
    here = Path(path).resolve().parent
    if promise is not None:
        changes["run.promise"] = os.path.relpath(write_promise(Path(result.folder or "."), promise), here)
    elif config.run.promise is not None:
        old = read_promise(here / config.run.promise)
        if isinstance(old, str) or old.plan != compute_plan_digest(planned.plan):
            changes["run.promise"] = None
    if is_measured and promise is None:
        notes = (*notes, "no run.promise was written: the plan took turns with others in less than two groups")
    if not changes:
        return Applied(diff="", notes=notes)
    if is_measured and pick.gain is not None:
        note += f": {say_speedup(encode(pick.gain))}{'' if pick.gain.verdict == 'faster' else ', not proven'}"
    diff = write_settings(path, changes, note=note, replaces=OWN_COMMENT)
    return Applied(diff=diff, notes=notes)
