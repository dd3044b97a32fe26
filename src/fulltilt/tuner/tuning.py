"""``tune``: from a workload to the picks. The order of a search, from the flags to the result."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fulltilt
from fulltilt.config import Config
from fulltilt.errors import UsageError
from fulltilt.hardware import has_c_compiler, read_machine
from fulltilt.levers import Facts, default_plan
from fulltilt.records import Machine, Roof, decode
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner import recommend, search
from fulltilt.tuner.conclude import conclude
from fulltilt.tuner.confirm import MAX_CONFIRM_ROUNDS
from fulltilt.tuner.finals import run_finals
from fulltilt.tuner.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.options import TuneOptions, build_options, choose_trial_limit_bytes, find_memory_gib, note_ranks
from fulltilt.tuner.progress import OnEvent, PickMade, SearchNoted, SearchStarted, TrialProgressed
from fulltilt.tuner.recommend import LearningRateRule
from fulltilt.tuner.result import TuneResult
from fulltilt.tuner.session import Session
from fulltilt.tuner.source import TuneTarget, resolve_target
from fulltilt.tuner.space import Space, build_space
from fulltilt.tuner.target import PROBE_ID, ROOFS_ID, ProcessTarget
from fulltilt.tuner.trial import refuse_inside_trial

if TYPE_CHECKING:
    from fulltilt.tasks import Workload

RESULT_FILE = "tune.json"


def tune(
    target: Config | Workload | str | os.PathLike[str],
    *,
    data_path: str | os.PathLike[str] | None = None,
    batch_sizes: Sequence[int] | None = None,
    num_workers: Sequence[int] | None = None,
    steps: int | None = None,
    device: str | None = None,
    memory_limit: str | int | None = None,
    exhaustive: bool = False,
    quick: bool = False,
    budget: str | float | None = None,
    free_batch: bool = False,
    lr_rule: LearningRateRule = "sqrt",
    out: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    on_event: OnEvent | None = None,
    deadline_s: float | None = None,
) -> TuneResult:
    """Find the fastest safe settings for a workload on this machine, by running them.

    Args:
        target: A Config, a Workload, a configuration file, or ``"module:object"``.
        data_path: Where the data lies (``data.path``).
        batch_sizes: Batch sizes to try; naming them frees the effective batch.
        num_workers: Worker counts to try.
        steps: Timed optimizer steps per trial, at least.
        device: auto, cpu, cuda or cuda:N.
        memory_limit: Bytes, or text such as ``12GiB``; a trial of which a process needs more is out of memory.
        exhaustive: Run the whole grid, instead of probing parts and running whole what may be the best.
        quick: One round, short trials, one repeat of the finalists, 90 s unless ``budget`` says otherwise.
        budget: Seconds, or text such as ``6m``, for the whole search.
        free_batch: Let the effective batch change.
        lr_rule: How the learning rate follows an effective batch that changed: sqrt, linear or none.
        out: The run folder; ``runs/tune/<name>`` by default. The same search resumes there.
        settings: Dotted keys that win over the configuration.
        on_event: Gets progress records as the search goes.
        deadline_s: Wall time of one trial; 120 s, 60 s when quick, and 60 s more over several processes.

    Raises:
        UsageError: wrong arguments, or called inside a trial. NoPlanError: no plan can run.
        RunFolderError: the folder is in use, or holds another search. StorageError: no space left; rows are kept.
        KeyboardInterrupt: after the running trial was ended; the rows measured so far are in the folder.
    """
    refuse_inside_trial("fulltilt.tune")
    _check_system()
    changes = dict(settings or {})
    if data_path is not None:
        changes["data.path"] = str(Path(data_path).resolve())
    aim = resolve_target(target, changes)
    options = build_options(
        aim.config, batch_sizes=batch_sizes, num_workers=num_workers, steps=steps, device=device,
        memory_limit=memory_limit, exhaustive=exhaustive, quick=quick, budget=budget, free_batch=free_batch,
        lr_rule=lr_rule, deadline_s=deadline_s,
    )  # fmt: skip
    machine = read_machine()
    path = Path(out) if out is not None else Path("runs") / "tune" / aim.name
    parts = _list_fingerprint_parts(aim, options, machine)
    with RunFolder(path, fingerprint_parts=parts, command="tune", results=[JOURNAL_FILE]) as folder:
        notes = note_ranks(options)
        return _run(aim, options, machine, folder, on_event or (lambda event: None), notes)


def _run(
    aim: TuneTarget,
    options: TuneOptions,
    machine: Machine,
    folder: RunFolder,
    tell: OnEvent,
    notes: tuple[str, ...],
) -> TuneResult:
    start_s = time.monotonic()
    journal = Journal(folder)
    target = ProcessTarget(
        aim.source,
        device=options.device,
        folder=folder.path,
        n_steps=options.n_steps,
        seed=aim.config.run.seed,
        memory_limit_bytes=choose_trial_limit_bytes(options, machine),
        deadline_s=options.deadline_s,
        max_measure_s=options.max_measure_s,
        rank_devices=options.rank_devices,
        on_progress=lambda id, values: (
            None if id in (PROBE_ID, ROOFS_ID) else tell(TrialProgressed(id=id, values=values))
        ),
    )
    try:
        probe = target.read_facts(default_plan({"batch_size": 1}))
        space = build_space(
            aim.config,
            _merge_facts(probe.facts, machine, options),
            batch_sizes=options.batch_sizes,
            num_workers=options.num_workers,
            free_batch=options.free_batch,
            all_levers=options.strategy == "model_first",
        )
        memory_gib = find_memory_gib(options, machine)
        room_gib = _choose_room_gib(memory_gib, target.memory_limit_bytes)
        space = dataclasses.replace(space, memory_gib=room_gib, notes=(*notes, *space.notes))
        session = _open_session(target, journal, space, options, folder, tell, start_s)
        _search(session, space, options)
        machine = dataclasses.replace(machine, roofs=_read_roofs(target, session, folder))
    finally:
        target.close()
    result = conclude(aim, options, machine, probe, space, session, journal, memory_gib, folder)
    for name in ("throughput", "efficiency", "memory", "recommended"):
        chosen = getattr(result.picks, name)
        if chosen is not None:
            tell(PickMade(name=name, trial=chosen.trial, rule=chosen.rule))
    folder.write_atomic(RESULT_FILE, result.to_json_text())
    return result


def _open_session(
    target: ProcessTarget,
    journal: Journal,
    space: Space,
    options: TuneOptions,
    folder: RunFolder,
    tell: OnEvent,
    start_s: float,
) -> Session:
    n_repeats = 3 if options.is_quick else 4 * MAX_CONFIRM_ROUNDS  # finalists; with the user's plan, in rounds
    n_planned = search.count_planned(space, options.strategy) + n_repeats
    session = Session(
        target,
        journal,
        budget_s=options.budget_s,
        reserve_trials=n_repeats,
        n_planned=n_planned,
        on_event=tell,
        start_s=start_s,
    )
    tell(
        SearchStarted(
            strategy=options.strategy,
            grid_size=space.size + len(space.skipped),
            n_planned=n_planned,
            n_resumed=journal.n_found,
            device=options.device,
            folder=str(folder.path),
        )
    )
    for note in (*journal.notes, *space.notes):
        tell(SearchNoted(message=note))
    return session


def _search(session: Session, space: Space, options: TuneOptions) -> None:
    """The strategy, then the finalists and the user's own plan side by side; others where all of those fail."""
    session.run(search.skip_impossible(space))
    session.run(search.STRATEGIES[options.strategy](space))
    if space.axes and not any(row.status != "skipped" for row in session.rows):
        session.run(search.run_nearest(space))  # the budget went into probes
    run_finals(
        session,
        space,
        n_finalists=search.count_finalists(options.strategy),
        max_rounds=1 if options.is_quick else MAX_CONFIRM_ROUNDS,
        with_baseline=not options.is_quick,
    )
    session.adopt_rest()


def _choose_room_gib(memory_gib: float | None, trial_limit_bytes: int | None) -> float | None:
    """What the search plans with: below the safety limit, and below what a trial is given."""
    limits = [] if memory_gib is None else [memory_gib * recommend.MEMORY_SAFETY_PCT / 100]
    if trial_limit_bytes is not None:
        limits.append(trial_limit_bytes / 2**30)
    return min(limits, default=None)


def _read_roofs(target: ProcessTarget, session: Session, folder: RunFolder) -> tuple[Roof, ...]:
    """Beside the trials they judge: a search that only read its rows back takes the roofs of then."""
    if session.n_run or not (folder.path / RESULT_FILE).exists():
        return target.read_roofs(default_plan({"batch_size": 1}))
    document = json.loads((folder.path / RESULT_FILE).read_text(encoding="utf-8"))
    return tuple(decode(Roof, roof) for roof in document["machine"].get("roofs", ()))


def _merge_facts(facts: Facts, machine: Machine, options: TuneOptions) -> Facts:
    """What the probe read inside the trial, completed by what the machine says; of several ranks as for one of them."""
    changes: dict[str, Any] = {"n_ranks": options.n_ranks}
    if facts.has_c_compiler is None:
        changes["has_c_compiler"] = has_c_compiler()
    if facts.n_cores_usable <= 1:
        changes["n_cores_usable"] = machine.n_cores_usable
    merged = dataclasses.replace(facts, device_type=options.device.partition(":")[0], **changes)
    changes = {"n_cores_usable": max(1, merged.n_cores_usable // options.n_ranks)}
    if merged.free_ram_bytes is not None:
        changes["free_ram_bytes"] = merged.free_ram_bytes // options.n_ranks
    return dataclasses.replace(merged, **changes)


def _list_fingerprint_parts(aim: TuneTarget, options: TuneOptions, machine: Machine) -> dict[str, Any]:
    """What rows depend on. The budget and the strategy are left out: more of a search may be asked for later."""
    flags = {
        "batch_sizes": options.batch_sizes,
        "num_workers": options.num_workers,
        "n_steps": options.n_steps,
        "device": options.device,
        "memory_limit_bytes": options.memory_limit_bytes,
        "free_batch": options.free_batch,
        "max_measure_s": options.max_measure_s,
    }
    if options.rank_devices:
        flags["rank_devices"] = options.rank_devices
    return {
        "config": aim.config.digest,
        "code": fulltilt.__version__,
        "workload": aim.digest,
        "flags": flags,
        "machine": {
            "hostname": machine.hostname_hash,
            "cpu": machine.cpu_model,
            "n_cores_usable": machine.n_cores_usable,
            "devices": [device.name for device in machine.devices],
            "packages": machine.packages,
        },
    }


def _check_system() -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError(f"tune runs on Linux and WSL2; this is {sys.platform}")
