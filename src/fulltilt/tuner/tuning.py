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

from fulltilt._version import __version__
from fulltilt.config import Config
from fulltilt.errors import ResultUnwrittenError, StorageError, UsageError
from fulltilt.hardware import has_c_compiler, read_machine
from fulltilt.levers import Facts, default_plan
from fulltilt.records import Machine, Roof, decode, format_bytes
from fulltilt.records.run_folder import RunFolder
from fulltilt.tuner.answer.conclude import conclude
from fulltilt.tuner.answer.result import RESULT_FILE, RESULT_FILES, TuneResult, write_result
from fulltilt.tuner.answer.verify import VERIFY_FOLDER
from fulltilt.tuner.picks import recommend
from fulltilt.tuner.question.data_stamp import stamp_data
from fulltilt.tuner.question.grid_size import count_grid
from fulltilt.tuner.question.options import (
    LearningRateRule,
    TuneOptions,
    build_options,
    choose_trial_limit_bytes,
    find_memory_gib,
    note_ranks,
)
from fulltilt.tuner.question.source import TuneTarget, resolve_target
from fulltilt.tuner.question.space import Space, build_space
from fulltilt.tuner.search import strategies as search
from fulltilt.tuner.search.budget import ROOFS_S, compute_search_s
from fulltilt.tuner.search.confirm import MAX_CONFIRM_ROUNDS
from fulltilt.tuner.search.finals import run_finals
from fulltilt.tuner.search.journal import JOURNAL_FILE, Journal
from fulltilt.tuner.search.progress import OnEvent, PickMade, SearchNoted, SearchStarted, TrialProgressed
from fulltilt.tuner.search.session import END_TO_END, RESERVE_SHARE, Session
from fulltilt.tuner.trials.target import PROBE_ID, ROOFS_ID, ProcessTarget
from fulltilt.tuner.trials.trial import refuse_inside_trial

if TYPE_CHECKING:
    from fulltilt.tasks import Workload

CODE, DATA = "code of the workload", "files of the data"
"""Parts of the fingerprint that change while the command stays the same: rows of before then say nothing."""
QUICK_REPEATS = 4  # two rounds of the pick and the user's own plan
QUICK_RESERVE_SHARE = 0.5  # of the budget at most: the pick and the user's plan side by side come first


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
    deadline: str | float | None = None,
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
        quick: The same search with few and short trials, 90 s unless ``budget`` says otherwise.
        budget: Seconds, or text such as ``6m``, for this call: what would end later is not begun, or ended. Rows that
            are in the folder already cost none of it.
        free_batch: Let the effective batch change.
        lr_rule: How the learning rate follows an effective batch that changed: sqrt, linear or none.
        out: The run folder; ``runs/tune/<name>`` by default. The same search resumes there.
        settings: Dotted keys that win over the configuration.
        on_event: Gets progress records as the search goes.
        deadline: Wall time of one trial, in seconds or text such as ``10m``; 120 s, 60 s when quick, and 60 s more over
            several processes.

    Raises:
        UsageError: wrong arguments, or called inside a trial. NoPlanError: no plan can run, or none did in the budget.
        RunFolderError: the folder is in use, or holds another search. StorageError: no space left; rows are kept.
        ResultUnwrittenError: no space left at the very end; it carries the result.
        KeyboardInterrupt: after the running trial was ended; the rows measured so far are in the folder.
    """
    start_s = time.monotonic()
    refuse_inside_trial("fulltilt.tune")
    _check_system()
    changes = dict(settings or {})
    if data_path is not None:
        changes["data.path"] = str(Path(data_path).resolve())
    aim = resolve_target(target, changes)
    options = build_options(
        aim.config, batch_sizes=batch_sizes, num_workers=num_workers, steps=steps, device=device,
        memory_limit=memory_limit, exhaustive=exhaustive, quick=quick, budget=budget, free_batch=free_batch,
        lr_rule=lr_rule, deadline=deadline,
    )  # fmt: skip
    machine = read_machine()
    path = Path(out) if out is not None else Path("runs") / "tune" / aim.name
    parts = _list_fingerprint_parts(aim, options, machine)
    results = [JOURNAL_FILE, VERIFY_FOLDER, *RESULT_FILES]
    with RunFolder(path, fingerprint_parts=parts, command="tune", results=results, aging=(CODE, DATA)) as folder:
        tell = on_event or (lambda event: None)
        notes = note_ranks(options)
        notes += () if folder.set_aside is None else (folder.set_aside,)
        for note in notes:  # at once: a search that fails or is interrupted has no result to say it
            tell(SearchNoted(message=note))
        return _run(aim, options, machine, folder, tell, notes, start_s)


def _run(
    aim: TuneTarget,
    options: TuneOptions,
    machine: Machine,
    folder: RunFolder,
    tell: OnEvent,
    notes: tuple[str, ...],
    start_s: float,
) -> TuneResult:
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
    budget = _plan_budget(options, start_s)
    target.end_s = None if journal.n_found else budget.end_s  # rows that are there are reported whatever is left
    try:
        probe = target.read_facts(default_plan({"batch_size": 1}))
        target.end_s = budget.search_end_s
        if not folder.is_resumed:  # a first use of the data may have fetched or prepared them
            folder.state_fingerprint(_list_fingerprint_parts(aim, options, machine))
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
        space = dataclasses.replace(space, memory_gib=room_gib)
        session = _open_session(target, journal, space, options, folder, tell, start_s, budget.search_s)
        space = dataclasses.replace(space, notes=(*notes, *space.notes))
        _search(session, space, options)
        target.end_s = budget.end_s
        roofs, roofs_missing = _read_roofs(target, session, folder)
        machine = dataclasses.replace(machine, roofs=roofs)
    finally:
        target.close()
    result = conclude(aim, options, machine, probe, space, session, journal, memory_gib, folder, roofs_missing)
    for name in ("throughput", "efficiency", "memory", "recommended"):
        chosen = getattr(result.picks, name)
        if chosen is not None:
            tell(PickMade(name=name, trial=chosen.trial, rule=chosen.rule))
    try:
        write_result(result, folder.path)
    except StorageError as error:
        raise ResultUnwrittenError(str(error), result) from error
    return result


def _open_session(
    target: ProcessTarget,
    journal: Journal,
    space: Space,
    options: TuneOptions,
    folder: RunFolder,
    tell: OnEvent,
    start_s: float,
    search_s: float | None,
) -> Session:
    n_sides = search.count_finalists(options.strategy) + 2  # the user's plan, and one more where rows are noisy
    n_repeats = QUICK_REPEATS if options.is_quick else n_sides * MAX_CONFIRM_ROUNDS
    planned = search.count_planned(space, options.strategy, is_limited=options.budget_s is not None)
    session = Session(
        target,
        journal,
        budget_s=search_s,
        reserve_trials=n_repeats,
        reserve_share=QUICK_RESERVE_SHARE if options.is_quick else RESERVE_SHARE,
        planned=planned,
        on_event=tell,
        start_s=start_s,
        n_devices=max(1, len(options.rank_devices)),
    )
    tell(
        SearchStarted(
            strategy=search.name_strategy(options.strategy),
            grid_size=count_grid(space) + len(space.skipped),
            n_planned=sum(planned.values()),
            n_resumed=journal.n_found,
            device=options.device,
            folder=str(folder.path),
            user_plan=space.user_plan,
            memory_room_gib=space.memory_gib,
        )
    )
    for note in (*journal.notes, *space.notes):
        tell(SearchNoted(message=note))
    return session


def _search(session: Session, space: Space, options: TuneOptions) -> None:
    """The strategy, then the finalists and the user's own plan side by side; others where all fail."""
    session.run(search.skip_impossible(space))
    session.run(search.run_own_plan(space, is_limited=session.budget_s is not None))
    strategy = search.STRATEGIES[options.strategy]
    session.run(strategy(space))
    if session.common_error:  # the settings as they were have the last word on whether the workload is broken
        session.run(search.run_own_plan(space, is_limited=True), despite_errors=True)
        if not session.common_error:
            session.run(strategy(space))
    if session.is_budget_spent and len({row.plan for row in session.rows if row.status == "ok"}) < 2:
        session.is_budget_spent = False  # nothing to measure again: what was kept back for that is the search's
        session.run(strategy(space), may_use_reserve=True)
    if space.axes and not any(row.status != "skipped" for row in session.rows):
        session.run(search.run_nearest(space))  # the budget went into probes
    session.adopt_rest((END_TO_END,))  # those of another strategy in this folder: the best of them is a finalist, too
    run_finals(session, space, n_finalists=search.count_finalists(options.strategy, session.rows))
    session.adopt_rest()


def _choose_room_gib(memory_gib: float | None, trial_limit_bytes: int | None) -> float | None:
    """What the search plans with: below the safety limit, and below what a trial is given."""
    limits = [] if memory_gib is None else [memory_gib * recommend.MEMORY_SAFETY_PCT / 100]
    if trial_limit_bytes is not None:
        limits.append(trial_limit_bytes / 2**30)
    return min(limits, default=None)


def _read_roofs(target: ProcessTarget, session: Session, folder: RunFolder) -> tuple[tuple[Roof, ...], str]:
    """The roofs, and why there are none where there are none.

    They are measured beside the trials they judge: a search that only read its rows back takes the roofs of then.
    """
    if session.n_run or not (folder.path / RESULT_FILE).exists():
        if target.end_s is not None and target.end_s - time.monotonic() < ROOFS_S:
            return (
                (),
                f"less than {ROOFS_S:g} s of the budget were left for roofs; a larger --budget holds them too",
            )
        roofs = target.read_roofs(default_plan({"batch_size": 1}))
        return roofs, f"no roof could be measured; see {folder.path / 'logs' / f'{ROOFS_ID}.log'}"
    try:
        document = json.loads((folder.path / RESULT_FILE).read_text(encoding="utf-8"))
        roofs = tuple(decode(Roof, roof) for roof in document["machine"].get("roofs", ()))
    except (
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ):  # cut short or edited: it is written anew from the rows
        return (), f"the {RESULT_FILE} that held them could not be read"
    return roofs, "none was, when these rows ran"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Budget:
    """What a search may take, and when it ends on ``time.monotonic``; None: no limit."""

    search_s: float | None = None  # without what is kept back for the roofs
    search_end_s: float | None = None
    end_s: float | None = None


def _plan_budget(options: TuneOptions, start_s: float) -> _Budget:
    """Rows of earlier runs in the folder cost nothing: while they counted, the same command could never go on."""
    if options.budget_s is None:
        return _Budget()
    search_s = compute_search_s(options.budget_s)
    return _Budget(search_s=search_s, search_end_s=start_s + search_s, end_s=start_s + options.budget_s)


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
        share_bytes = machine.memory_available_bytes // options.n_ranks  # the limit of a trial is a rank's already
        changes["free_ram_bytes"] = min(merged.free_ram_bytes, share_bytes)
    return dataclasses.replace(merged, **changes)


def _list_fingerprint_parts(aim: TuneTarget, options: TuneOptions, machine: Machine) -> dict[str, Any]:
    """What rows depend on. The budget and the strategy are left out: more of a search may be asked for later.

    A refusal names the parts that changed, so they are called what the user calls them.
    """
    limit_bytes = options.memory_limit_bytes
    flags = {
        "--batch-sizes": options.batch_sizes and " ".join(map(str, options.batch_sizes)),
        "--num-workers": options.num_workers and " ".join(map(str, options.num_workers)),
        "--steps": options.n_steps,
        "--device": options.device,
        "--memory-limit": limit_bytes and f"{format_bytes(limit_bytes)} = {limit_bytes:,} bytes",
        "--free-batch": options.free_batch,
        "--quick (shorter trials)": options.is_quick,
        "--deadline": options.deadline_asked_s and f"{options.deadline_asked_s:g} s",
    }
    if options.rank_devices:
        flags["devices"] = " ".join(options.rank_devices)
    values = aim.config.to_values()
    values["run"].pop("promise")  # a search must not lose its rows to what it promised itself
    return {
        **values,
        "version of fulltilt": __version__,
        CODE: aim.code,
        DATA: stamp_data(aim.config),
        **{flag: "not given" if value is None or value is False else value for flag, value in flags.items()},
        "machine": {
            "host": machine.hostname_hash,
            "processor": machine.cpu_model,
            "usable cores": machine.n_cores_usable,
            "accelerators": [device.name for device in machine.devices],
            **machine.packages,
        },
    }


def _check_system() -> None:
    if not sys.platform.startswith("linux"):
        raise UsageError(f"tune runs on Linux and WSL2; this is {sys.platform}")
